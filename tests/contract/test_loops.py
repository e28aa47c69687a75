"""Every block of zero/recipes runs as it stands, and trains to the bits of the plain loop.

A block is run on two processes, with the variables of the block `Start` (or with that block `Start` itself, on
two launched processes), and with the names of the recipes' table:

    model, loader     of the `Example` below, from a seed
    loss_fn           torch's mean squared error
    stage             each of 0 to 3
    device, backend   "cpu", "aot_eager"
    path, folder      a file, and a folder, in a temporary folder
    optimizer         for `Saving` alone: the one that `fp32` built and trained with
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zero import MixedPrecision, ZeroOptimizer, save

from ..support.launched import launch
from ..support.loops import (
    BLOCKS,
    ECOSYSTEM,
    Conditioned,
    PlainLoop,
    autocast_loss,
    code_of,
    even,
    loss_in_chunks,
    muon_and_adamw,
    network,
    resetting,
    second_loss,
    seeded,
    sum_of_losses,
    tokens_of,
    total_loss,
    uneven,
    with_batch_norm,
)
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from ..support.pool import GlooPool

pytestmark = pytest.mark.contract

STAGES = (0, 1, 2, 3)
WORLD_SIZE = 2
BACKEND = "aot_eager"  # inductor would compile C++


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-2, total_steps=10)


@dataclass(frozen=True)
class Example:
    """The inputs of a block, and the plain loop over them."""

    plain: PlainLoop
    build: Callable[[], nn.Module] = network
    loader: Callable[[int], list[tuple[Tensor, Tensor]]] = even
    count: int = 8
    compiled: bool = False

    def model(self) -> nn.Module:
        return seeded(7, self.build)

    def expected(self) -> nn.Module:
        model = self.model()
        if self.compiled:
            blocks: Any = model.blocks
            for block in blocks:
                block.compile(backend=BACKEND)
        self.plain.run(model, self.loader(self.count))
        return model


EXAMPLES = {
    "fp32": Example(PlainLoop()),
    "Gradient accumulation": Example(PlainLoop(together=4)),
    "Several losses": Example(PlainLoop(sum_of_losses)),
    "Several backwards": Example(PlainLoop(second_loss)),
    "Mixed precision": Example(PlainLoop(precision=MixedPrecision(torch.bfloat16))),
    "fp16 and a GradScaler": Example(PlainLoop(precision=MixedPrecision(torch.float16), scale=1024.0)),
    "Autocast": Example(PlainLoop(autocast_loss)),
    "Token counts": Example(PlainLoop(total_loss, divisor=tokens_of), loader=uneven),
    "Uneven data": Example(PlainLoop(total_loss, divisor=tokens_of), loader=uneven, count=7),
    "Learning rate schedulers": Example(PlainLoop(scheduler=one_cycle)),
    "Muon and AdamW": Example(PlainLoop(optimizer_of=muon_and_adamw)),
    "Moving averages": Example(PlainLoop()),
    "New moments": Example(PlainLoop(optimizer_of=resetting)),
    "Batch norm": Example(PlainLoop(), build=with_batch_norm),
    "torch.compile": Example(PlainLoop(), build=Conditioned, compiled=True),
    "Activation checkpointing": Example(PlainLoop()),
    "A loss in chunks": Example(PlainLoop(loss_in_chunks)),
}
OTHERS = ("Start", "Saving", "Loading", "Checkpoints", "Pipeline parallelism", "From FSDP2", "To FSDP2")


def names_of(example: Example, stage: int, group: dist.ProcessGroup | None, rank: int) -> dict[str, Any]:
    """Return the variables of the guide's first block, for the ranks of a group, and those of the recipes' table."""
    return {
        "islice": islice,
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "MixedPrecision": MixedPrecision,
        "ZeroOptimizer": partial(ZeroOptimizer, process_group=group),
        "rank": rank,
        "world": WORLD_SIZE,
        "model": example.model(),
        "loader": example.loader(example.count),
        "loss_fn": nn.functional.mse_loss,
        "stage": stage,
        "device": "cpu",
        "backend": BACKEND,
    }


def trained(names: dict[str, Any]) -> nn.Module:
    """Return the plain model that a block trained, unwrapped."""
    names["optimizer"].check_replicas()
    names["optimizer"].close()
    model: nn.Module = names["model"]
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()  # the memory of a shared parameter would end with this process
    return model


def run_block(group: dist.ProcessGroup, rank: int, heading: str) -> list[Any]:
    """Run the block at each stage; return the states of the model and of other trained objects."""
    results = []
    for stage in STAGES:
        torch._dynamo.reset()  # do not count graphs of earlier stages
        names = names_of(EXAMPLES[heading], stage, group, rank)
        exec(code_of(heading), names)
        averaged = names["average"].gather() if "average" in names else None
        results.append((trained(names).state_dict(), averaged))
    return results


def assert_same_dict(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert_same_bits(ours[name], value, name)


def test_every_block_of_the_guide_is_run() -> None:
    assert set(BLOCKS) == {*EXAMPLES, *OTHERS, *ECOSYSTEM}


@pytest.mark.parametrize("heading", [name for name in EXAMPLES if name != "Batch norm"])
@pytest.mark.by_default("fp32", "Uneven data")
def test_a_block_trains_the_bits_of_the_plain_loop_at_every_stage(gloo: GlooPool, heading: str) -> None:
    expected = EXAMPLES[heading].expected()
    before = EXAMPLES[heading].model()
    assert all(not torch.equal(p.float(), q) for p, q in zip(expected.parameters(), before.parameters(), strict=True))
    for by_stage in gloo.run(run_block, heading):
        for state, _ in by_stage:
            assert_same_dict(state, expected.state_dict())


@pytest.mark.full
def test_a_moving_average_is_that_of_the_plain_loop(gloo: GlooPool) -> None:
    example = EXAMPLES["Moving averages"]
    model = example.model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    PlainLoop(after_step=average.update_parameters).run(model, example.loader(example.count))
    first, second = gloo.run(run_block, "Moving averages")
    for _, averaged in first:
        assert_same_dict(averaged, dict(average.module.named_parameters()))
    assert all(averaged is None for _, averaged in second)


def test_batch_norm_has_the_plain_loops_parameters_and_rank_0s_statistics_everywhere(gloo: GlooPool) -> None:
    example = EXAMPLES["Batch norm"]
    expected = example.expected()
    batches = example.loader(example.count)
    alone, statistics = example.model(), example.model()

    def keep_rank_0s(model: nn.Module, batch: Any) -> Tensor:
        """Make the running statistics of a plain loop use only every second micro-batch."""
        kept = [buffer.clone() for buffer in model.buffers()]
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if next(number for number, known in enumerate(batches) if known is batch) % WORLD_SIZE:
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.data.copy_(value)  # past the version counter: the backward has read what it needs
        return loss

    PlainLoop(keep_rank_0s).run(statistics, batches)
    assert_same_model(statistics, expected)
    assert not torch.equal(statistics.state_dict()["1.running_mean"], alone.state_dict()["1.running_mean"])
    for by_stage in gloo.run(run_block, "Batch norm"):
        for state, _ in by_stage:
            assert_same_dict(state, statistics.state_dict())


def already(built: ZeroOptimizer, *_: Any, **__: Any) -> ZeroOptimizer:
    return built


def save_and_load(group: dist.ProcessGroup, rank: int, path: str) -> list[Any]:
    """Return for each stage the saved file, and the model after training on from it at another stage."""
    results = []
    for stage in STAGES:
        names = {**names_of(EXAMPLES["fp32"], stage, group, rank), "path": f"{path}-{stage}"}
        exec(code_of("fp32"), names)
        names["dist"] = Barrier(group)
        exec(code_of("Saving"), names)
        names["optimizer"].close()
        names["dist"].barrier()

        later = {**names_of(EXAMPLES["fp32"], 3 - stage, group, rank), "path": f"{path}-{stage}"}
        later["model"] = seeded(8, network)
        exec(code_of("Loading"), later)
        later["ZeroOptimizer"] = partial(already, later["optimizer"])  # the loop continues with the loaded optimizer
        exec(code_of("fp32"), later)
        results.append((torch.load(f"{path}-{stage}", weights_only=True), trained(later).state_dict()))
    return results


class Barrier:
    """`torch.distributed` for the ranks of a group; the blocks use only its barrier."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.barrier = partial(dist.barrier, group)


@pytest.mark.full
def test_what_was_saved_is_plain_and_training_goes_on_from_it(gloo: GlooPool, tmp_path: Path) -> None:
    example = EXAMPLES["fp32"]
    model, batches = example.model(), example.loader(example.count)
    optimizer = example.plain.run(model, batches)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    PlainLoop(optimizer=optimizer).run(model, batches)
    for by_stage in gloo.run(save_and_load, str(tmp_path / "saved")):
        for saved, state in by_stage:
            assert_same_dict(saved["model"], weights)
            assert_same_states(saved["optimizer"], states)
            assert_same_dict(state, model.state_dict())


def stop_and_go_on(group: dist.ProcessGroup, rank: int, path: str) -> list[dict[str, Tensor]]:
    """Run the block over half of the micro-batches, and then at another stage over all of them."""
    results = []
    for stage in STAGES:
        names = {**names_of(EXAMPLES["fp32"], stage, group, rank), "folder": f"{path}-{stage}"}
        names["loader"] = names["loader"][: len(names["loader"]) // 2]
        exec(code_of("Checkpoints"), names)
        names["optimizer"].close()
        later = {**names_of(EXAMPLES["fp32"], 3 - stage, group, rank), "folder": f"{path}-{stage}"}
        later["model"] = seeded(8, network)
        exec(code_of("Checkpoints"), later)
        results.append(trained(later).state_dict())
    return results


@pytest.mark.full
def test_a_loop_that_was_stopped_goes_on_from_its_checkpoint(gloo: GlooPool, tmp_path: Path) -> None:
    expected = EXAMPLES["fp32"].expected().state_dict()
    for by_stage in gloo.run(stop_and_go_on, str(tmp_path / "run")):
        for state in by_stage:
            assert_same_dict(state, expected)


def through_a_pipeline(names: dict[str, Any], _: Path) -> list[dict[str, Tensor]]:
    """Return the parameters of all parts, at each stage."""
    results = []
    for stage in STAGES:
        scope = {**names_of(EXAMPLES["fp32"], stage, None, names["rank"]), **_public(names)}
        exec(code_of("Pipeline parallelism"), scope)
        scope["optimizer"].check_replicas()
        scope["optimizer"].close()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {name: p.detach().clone() for name, p in scope["part"].named_parameters()})
        results.append({name: value for part in parts for name, value in part.items()})
    return results


@pytest.mark.full
def test_a_pipeline_of_two_stages_with_two_copies_each_trains_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    expected, batches = EXAMPLES["fp32"].model(), EXAMPLES["fp32"].loader(8)
    halves = [
        (inputs.chunk(2)[half], targets.chunk(2)[half])
        for step in range(0, len(batches), 2)
        for half in range(2)
        for inputs, targets in batches[step : step + 2]
    ]
    PlainLoop(together=4, max_norm=float("inf")).run(expected, halves)
    for state in launch("tests.contract.test_loops:through_a_pipeline", tmp_path, ranks=4):
        assert_same_dict(state, dict(expected.named_parameters()))


def from_and_to_fsdp2(names: dict[str, Any], folder: Path) -> list[dict[str, Tensor]]:
    """Train a part of the micro-batches here, a part by FSDP2, and the rest here again."""
    from torch.distributed.fsdp import fully_shard

    rank, loader = names["rank"], EXAMPLES["fp32"].loader(12)
    scope = {**names_of(EXAMPLES["fp32"], 3, None, rank), **_public(names), "path": str(folder / "file")}
    ours = ZeroOptimizer(scope["model"], torch.optim.AdamW, stage=3, lr=1e-2)
    step_through(scope["model"], ours, loader[:4], rank)
    checkpoint = str(folder / "checkpoint")
    save(checkpoint, ours)
    ours.close()
    theirs = seeded(8, network)
    fully_shard(theirs)
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    exec(code_of("To FSDP2"), {**scope, "fsdp_model": theirs, "fsdp_optimizer": peer, "checkpoint": checkpoint})
    step_through(theirs, peer, loader[4:8], rank)
    exec(code_of("From FSDP2"), {**scope, "fsdp_model": theirs, "fsdp_optimizer": peer})
    later = {**scope, "model": seeded(9, network), "stage": 2}
    exec(code_of("Loading"), later)
    step_through(later["model"], later["optimizer"], loader[8:], rank)
    return [trained(later).state_dict()]


def _public(names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if not name.startswith("__")}


def step_through(model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]], rank: int) -> None:
    """Take a step for every two micro-batches."""
    for inputs, targets in batches[rank::WORLD_SIZE]:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.full
def test_training_goes_to_fsdp2_and_comes_back_with_the_plain_loops_bits(tmp_path: Path) -> None:
    """Two ranks with a micro-batch each: a sum of two terms has one order, and FSDP2's bits are the plain loop's."""
    expected, batches = EXAMPLES["fp32"].model(), EXAMPLES["fp32"].loader(12)
    PlainLoop(max_norm=float("inf")).run(expected, batches)
    for state in launch("tests.contract.test_loops:from_and_to_fsdp2", tmp_path):
        assert_same_dict(state, expected.state_dict())


def begin(names: dict[str, Any], _: Path) -> list[dict[str, Tensor]]:
    """Run after the guide's first block: the world is the group."""
    results = []
    for stage in STAGES:
        given = names_of(EXAMPLES["fp32"], stage, None, names["rank"])
        scope = {**given, **{name: value for name, value in names.items() if not name.startswith("__")}}
        exec(code_of("fp32"), scope)
        results.append(trained(scope).state_dict())
    return results


@pytest.mark.full
def test_the_first_block_begins_a_world_of_processes(tmp_path: Path) -> None:
    expected = EXAMPLES["fp32"].expected().state_dict()
    states = launch("tests.contract.test_loops:begin", tmp_path)
    assert len(states) == len(STAGES)
    for state in states:
        assert_same_dict(state, expected)
