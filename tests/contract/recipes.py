"""The blocks of zero/recipes as programs of two processes, with their inputs and plain loops.

A block is run with the variables of the block `Start` (or with that block itself, on launched processes), and with the
names of the recipes' table:

    model, dataset    of the `Example` below, from a seed
    sampler, loader   those of the block `Data`; where micro-batches have several sizes, a list of this rank's
    loss_fn           torch's mean squared error
    stage             each of 0 to 3
    device, backend   "cpu", "aot_eager"
    path, folder      a file, and a folder, in a temporary folder
    optimizer         for `Saving` alone: the one that `fp32` built and trained with
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zero import MicroBatchSampler, MixedPrecision, StochasticRounding, ZeroOptimizer, save

from ..support import loops
from ..support.models import take_steps
from ..support.plain import assert_same_bits, assert_same_value
from ..support.pool import GlooPool

STAGES = (0, 1, 2, 3)
WORLD_SIZE = 2
BACKEND = "aot_eager"  # inductor would compile C++


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-2, total_steps=4)


def to_float8(model: nn.Module) -> None:
    torchao = pytest.importorskip("torchao.float8")
    torchao.convert_to_float8_training(model, config=torchao.Float8LinearConfig(emulate=True))


@contextmanager
def deterministic() -> Iterator[None]:
    """Put back what the block sets for the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        try:
            yield
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.backends.cudnn.benchmark
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        finally:
            torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Example:
    """The inputs of a block, and the plain loop over them."""

    plain: loops.PlainLoop
    build: Callable[[], nn.Module] = loops.network
    given: Callable[[int], list[tuple[Tensor, Tensor]]] = loops.even
    count: int = 8
    compiled: bool = False
    changed: Callable[[nn.Module], object] | None = None  # by the block, before it trains
    everywhere: bool = False  # the loader has all micro-batches on each rank
    setting: Callable[[], AbstractContextManager[None]] = nullcontext  # around the block

    def model(self) -> nn.Module:
        return loops.seeded(7, self.build)

    def expected(self) -> nn.Module:
        model = self.model()
        if self.changed is not None:
            self.changed(model)
        if self.compiled:
            blocks: Any = model.blocks
            for block in blocks:
                block.compile(backend=BACKEND)
        self.plain.run(model, self.micro_batches())
        return model

    def dataset(self) -> list[tuple[Tensor, Tensor]]:
        return [sample for inputs, targets in self.given(self.count) for sample in zip(inputs, targets, strict=True)]

    def micro_batches(self, rank: int = 0, world: int = 1, epoch: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of a rank; by default all of them, as the plain loop has them."""
        if self.given is loops.even:
            dataset: Any = self.dataset()
            sampler = MicroBatchSampler(dataset, loops.SAMPLES, rank, world)
            sampler.set_epoch(epoch)
            return [tuple(batch) for batch in DataLoader(dataset, batch_sampler=sampler)]
        given = self.given(self.count)
        return [given[index] for (index,) in MicroBatchSampler(given, 1, rank, world)]


BY_NAME = {
    "*": MixedPrecision(torch.bfloat16),
    "*norm": MixedPrecision(torch.float32, output_dtype=torch.bfloat16),
    "head": MixedPrecision(torch.float32),
}
EXAMPLES = {
    "fp32": Example(loops.PlainLoop()),
    "A loader of your own": Example(loops.PlainLoop(), everywhere=True),
    "Lend the GPU": Example(loops.PlainLoop()),
    "Gradient accumulation": Example(loops.PlainLoop(together=4)),
    "Several losses": Example(loops.PlainLoop(loops.sum_of_losses)),
    "Several backwards": Example(loops.PlainLoop(loops.second_loss)),
    "Mixed precision": Example(loops.PlainLoop(precision=MixedPrecision(torch.bfloat16))),
    "Norms and heads in fp32": Example(loops.PlainLoop(precision=BY_NAME), build=loops.with_norm_and_head),
    "Stochastic rounding": Example(
        loops.PlainLoop(precision=MixedPrecision(torch.bfloat16), rounding=StochasticRounding(0))
    ),
    "fp16 and a GradScaler": Example(loops.PlainLoop(precision=MixedPrecision(torch.float16), scale=1024.0)),
    "Autocast": Example(loops.PlainLoop(loops.autocast_loss)),
    "float8": Example(loops.PlainLoop(), changed=to_float8),
    "Gradients of your own": Example(loops.PlainLoop(before_clip=loops.mask_eight_rows)),
    "Token counts": Example(loops.PlainLoop(loops.total_loss, divisor=loops.tokens_of), given=loops.uneven),
    "Uneven data": Example(loops.PlainLoop(loops.total_loss, divisor=loops.tokens_of), given=loops.uneven, count=7),
    "Ranks with other inputs": Example(loops.PlainLoop(), build=loops.TextOrImage, given=loops.text_and_images),
    "Logging": Example(loops.PlainLoop()),
    "Determinism on a GPU": Example(loops.PlainLoop(), setting=deterministic),
    "Learning rate schedulers": Example(loops.PlainLoop(scheduler=one_cycle)),
    "Muon and AdamW": Example(loops.PlainLoop(optimizer_of=loops.muon_and_adamw)),
    "Muon for experts and fused projections": Example(
        loops.PlainLoop(optimizer_of=loops.muon_in_blocks), build=loops.WithExperts
    ),
    "Moving averages": Example(loops.PlainLoop()),
    "Schedule-free classes": Example(loops.PlainLoop(optimizer_of=loops.schedule_free)),
    "New moments": Example(loops.PlainLoop(optimizer_of=loops.resetting)),
    "Batch norm": Example(loops.PlainLoop(), build=loops.with_batch_norm),
    "torch.compile": Example(loops.PlainLoop(), build=loops.Conditioned, compiled=True),
    "Activation checkpointing": Example(loops.PlainLoop()),
    "A loss in chunks": Example(loops.PlainLoop(loops.loss_in_chunks)),
}
REQUIRED = {"Schedule-free classes": "schedulefree", "float8": "torchao"}  # packages that a block imports besides torch
ON_MESHES = ("A mesh", "Tensor parallelism by hand", "Pipeline parallelism")


def names_of(example: Example, stage: int, group: dist.ProcessGroup | None, rank: int) -> dict[str, Any]:
    """Return the variables of the blocks `Start` and `Data`, for ranks of a group, and those of the recipes' table."""
    names = {
        "islice": islice,
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "DataLoader": DataLoader,
        "MicroBatchSampler": MicroBatchSampler,
        "MixedPrecision": MixedPrecision,
        "ZeroOptimizer": partial(ZeroOptimizer, process_group=group),
        "rank": rank,
        "world": WORLD_SIZE,
        "model": example.model(),
        "dataset": example.dataset(),
        "batch_size": loops.SAMPLES,
        "epochs": 1,
        "loss_fn": nn.functional.mse_loss,
        "stage": stage,
        "device": "cpu",
        "backend": BACKEND,
    }
    if example.given is loops.even and not example.everywhere:
        exec(loops.code_of("Data"), names)
    else:
        names["loader"] = example.micro_batches() if example.everywhere else example.micro_batches(rank, WORLD_SIZE)
    return names


def trained(names: dict[str, Any]) -> nn.Module:
    """Return the plain model that a block trained, unwrapped."""
    names["optimizer"].check_replicas()
    names["optimizer"].close()
    model: nn.Module = names["model"]
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()  # the memory of a shared parameter would end with this process
    return model


def run_block(group: dist.ProcessGroup, rank: int, heading: str) -> list[dict[str, Tensor]]:
    """Run the block at each stage; return the states of the model."""
    results = []
    for stage in STAGES:
        torch._dynamo.reset()  # do not count graphs of earlier stages
        names = names_of(EXAMPLES[heading], stage, group, rank)
        with EXAMPLES[heading].setting():
            exec(loops.code_of(heading), names)
        results.append(trained(names).state_dict())
    return results


def assert_trains_as_plain(pool: GlooPool, heading: str) -> None:
    """Assert that a block changes every parameter, and has the bits of its plain loop at each stage."""
    before, expected = EXAMPLES[heading].model(), EXAMPLES[heading].expected()
    assert all(not torch.equal(p.float(), q) for p, q in zip(expected.parameters(), before.parameters(), strict=True))
    for by_stage in pool.run(run_block, heading):
        for state in by_stage:
            assert_same_dict(state, expected.state_dict())


def assert_same_dict(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert_same_bits(ours[name], value, name)


def save_and_load(group: dist.ProcessGroup, rank: int, path: str) -> list[Any]:
    """Return for each stage the saved file, and the model after training on from it at another stage."""
    results = []
    for stage in STAGES:
        names = {**names_of(EXAMPLES["fp32"], stage, group, rank), "path": f"{path}-{stage}"}
        exec(loops.code_of("fp32"), names)
        names["dist"] = SimpleNamespace(barrier=partial(dist.barrier, group))
        held: dict[str, Tensor] = {}
        names["engine"] = SimpleNamespace(load=held.__setitem__, tensors=held.items)
        exec(loops.code_of("To an inference engine"), names)
        exec(loops.code_of("Saving"), names)
        assert_same_value(held, {} if rank else dict(names["weights"]), "what the engine holds")
        names["optimizer"].close()
        names["dist"].barrier()

        later = {**names_of(EXAMPLES["fp32"], 3 - stage, group, rank), "path": f"{path}-{stage}"}
        later["model"] = loops.seeded(8, loops.network)
        exec(loops.code_of("Loading"), later)
        later["ZeroOptimizer"] = lambda *_, built=later["optimizer"], **__: (
            built
        )  # the loop continues with the loaded optimizer
        exec(loops.code_of("fp32"), later)
        results.append((torch.load(f"{path}-{stage}", weights_only=True), trained(later).state_dict()))
    return results


def stop_and_go_on(group: dist.ProcessGroup, rank: int, path: str) -> list[dict[str, Tensor]]:
    """Run the block over one epoch, lose its last checkpoint, and run it at another stage over two epochs."""
    results = []
    for stage in STAGES:
        folder = Path(f"{path}-{stage}")
        names = {**names_of(EXAMPLES["fp32"], stage, group, rank), "folder": folder}
        exec(loops.code_of("Checkpoints"), names)
        names["optimizer"].close()
        if rank == 0:
            shutil.rmtree(max(folder.glob("step-*")))
        dist.barrier(group)
        later = {**names_of(EXAMPLES["fp32"], 3 - stage, group, rank), "folder": folder, "epochs": 2}
        later["model"] = loops.seeded(8, loops.network)
        exec(loops.code_of("Checkpoints"), later)
        assert later["restored"].step == 2
        results.append(trained(later).state_dict())
    return results


def started_names(names: dict[str, Any], stage: int) -> dict[str, Any]:
    """Return the variables of a block for processes that have run the block `Start`: the world is the group."""
    public = {name: value for name, value in names.items() if not name.startswith("__")}
    return {**names_of(EXAMPLES["fp32"], stage, None, names["rank"] % WORLD_SIZE), **public}


def on_meshes(names: dict[str, Any], _: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Return for each block the parameters of all parts, at each stage."""
    return {heading: [on_a_mesh(names, heading, stage) for stage in STAGES] for heading in ON_MESHES}


def on_a_mesh(names: dict[str, Any], heading: str, stage: int) -> dict[str, Tensor]:
    """Return the parameters of all parts. Before the name of a part along tp is its place."""
    scope = started_names(names, stage)
    exec(loops.code_of("Data"), scope)
    if heading.startswith("Tensor"):
        scope["model"] = loops.seeded(7, loops.two_layers)
    exec(loops.code_of(heading), scope)
    scope["optimizer"].check_replicas()
    scope["optimizer"].close()
    mine = scope.get("part", scope["model"])
    prefix = f"{scope['mesh'].get_local_rank('tp')}." if heading.startswith("Tensor") else ""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {prefix + name: p.detach().clone() for name, p in mine.named_parameters()})
    return {name: value for part in parts for name, value in part.items()}


def from_and_to_fsdp2(names: dict[str, Any], folder: Path) -> list[dict[str, Tensor]]:
    """Train a part of the micro-batches here, a part by FSDP2, and the rest here again."""
    from torch.distributed.fsdp import fully_shard

    rank, loader = names["rank"], EXAMPLES["fp32"].given(12)
    scope = {**started_names(names, 3), "path": str(folder / "file")}
    ours = ZeroOptimizer(scope["model"], torch.optim.AdamW, stage=3, lr=1e-2)
    step_through(scope["model"], ours, loader[:4], rank)
    checkpoint = str(folder / "checkpoint")
    save(checkpoint, ours)
    ours.close()
    theirs = loops.seeded(8, loops.network)
    fully_shard(theirs)
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    exec(loops.code_of("To FSDP2"), {**scope, "fsdp_model": theirs, "fsdp_optimizer": peer, "checkpoint": checkpoint})
    step_through(theirs, peer, loader[4:8], rank)
    exec(loops.code_of("From FSDP2"), {**scope, "fsdp_model": theirs, "fsdp_optimizer": peer})
    later = {**scope, "model": loops.seeded(9, loops.network), "stage": 2}
    exec(loops.code_of("Loading"), later)
    step_through(later["model"], later["optimizer"], loader[8:], rank)
    return [trained(later).state_dict()]


def step_through(model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]], rank: int) -> None:
    """Take a step for every two micro-batches."""
    take_steps(model, optimizer, batches[rank::WORLD_SIZE], loops.mean_loss)
