"""The plain loop on a GPU, bit for bit: one rank with NCCL, and several ranks on one GPU over gloo.

Each test also runs on the CPU, where everything specific to a GPU does nothing. That only shows that the test's code
works on machines without a GPU. The plain loop runs on the same device, with torch's deterministic algorithms. Ranks
are processes: autograd runs the backwards of all threads of a process on one GPU in one thread, where a rank would wait
for the others forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero import Offload, ZeroOptimizer

from ..support.models import build, odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model, assert_same_states, plain_step, share
from ..support.pool import GlooPool
from ..support.programs import Program, Round, Step, compare, run_rank

pytestmark = pytest.mark.contract

GPU = "cuda:0"
HAS_GPU = torch.cuda.is_available()
DEVICES = ("cpu", pytest.param(GPU, marks=pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")))
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # torch requires it for deterministic matrix products


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, which also fill uninitialized memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True)
class Ranks:
    """Processes whose models are on one device."""

    device: str
    pool: GlooPool

    def run(self, program: Any, *arguments: Any, world_size: int) -> Any:
        return self.pool.run(program, *arguments, ranks=range(world_size), limit=100)


@pytest.fixture(params=DEVICES, scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Return ranks on a device.

    For a GPU they are spawned: a fork of a process that may have used CUDA cannot use it.
    """
    if request.param == "cpu":
        yield Ranks("cpu", request.getfixturevalue("gloo"))
        return
    pool = GlooPool("spawn")
    with deterministic_products():
        yield Ranks(request.param, pool)
    pool.stop()


@contextmanager
def deterministic_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in DETERMINISTIC.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set up torch for deterministic results on a device."""
    with deterministic_products(), deterministic():
        yield request.param


# -- programs ----------------------------------------------------------------------------------------------------------

CLIPPED = Step(clips=((0.1, 2.0), (0.05, 3.0)))
PENDING = Step((Round(sync=False), Round()), divisor=3.0)
THAWED = Step((Round(), Round()), toggle=("frozen",), clips=((0.1, float("inf")),))
ALONE = Step((Round(), Round(ranks=1)), clear="zeros")  # for stages where one rank alone may run a backward
EVERYWHERE = (CLIPPED, PENDING, Step(clear="none"), THAWED)
PROGRAMS = [
    Program(world_size, stage, ("adamw fused", "adamw for-loop")[(world_size + stage) % 2], cap, steps=steps)
    for world_size, cap in ((1, 25.0), (2, 0.0005), (3, 1e-6))
    for stage in (0, 1, 2, 3)
    for steps in [EVERYWHERE if stage == 3 else (*EVERYWHERE, ALONE)]
]
PROGRAMS += [replace(program, optimizer="adamw foreach", dtype=torch.bfloat16) for program in PROGRAMS[4:8]]
PROGRAMS += [replace(program, collective="pairwise") for program in PROGRAMS[8:12]]
PROGRAMS += [replace(program, precision=PRECISIONS["bf16"]) for program in PROGRAMS[:8]]
PROGRAMS += [replace(program, precision=PRECISIONS["fp16"], scaled=True) for program in PROGRAMS[4:8]]
PROGRAMS += [replace(program, offload=Offload("cpu")) for program in PROGRAMS[:8]]


def named(program: Program) -> str:
    mixed = f"-{program.precision.param_dtype}" if program.precision else ""
    more = f"{mixed}-offload" if program.offload else mixed
    return f"W{program.world_size}-stage{program.stage}-{program.optimizer}-{program.dtype}-{program.collective}{more}"


def whole_program(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    with deterministic():
        return run_rank(program, group)


def beside_nccl(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    """Run in a group of this rank alone, whose tensors NCCL transfers if they are on a GPU."""
    backend = "nccl" if program.device.startswith("cuda") else "gloo"
    alone = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    try:
        summed = torch.ones(3, device=program.device)
        dist.all_reduce(summed, group=alone)
        assert summed.tolist() == [1.0] * 3
        return whole_program(alone, rank, program)
    finally:
        dist.destroy_process_group(alone)


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_programs_give_the_bits_of_the_plain_loop_on_the_same_device(ranks: Ranks, program: Program) -> None:
    program = replace(program, device=ranks.device)
    run = beside_nccl if program.world_size == 1 else whole_program
    results = ranks.run(run, program, world_size=program.world_size)
    with deterministic():
        plain = compare(program, results)
    assert_same_states(results[0][3], plain.optimizer.state_dict())


# -- asynchronous work of a GPU ----------------------------------------------------------------------------------------


@contextmanager
def nobody_waits(device: str) -> Iterator[None]:
    """Make torch raise if the host waits for a GPU."""
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_a_stream(device: str) -> AbstractContextManager[Any]:
    """Use a new stream, behind all work enqueued before."""
    if not device.startswith("cuda"):
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> None:
    for batch in batches:
        odd_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def on(device: str, batches: Sequence[Any]) -> list[Any]:
    return [(tokens.to(device), extra) for tokens, extra in batches]


@STAGES
@pytest.mark.parametrize("offload", [None, Offload("cpu")], ids=["", "offload"])
@pytest.mark.filterwarnings("ignore:offload")
def test_a_step_lets_the_host_run_ahead(device: str, stage: int, offload: Offload | None) -> None:
    """This holds after the first two steps, which create states, on another stream than that of the construction."""
    model, plain, batches = build().to(device), build().to(device), on(device, odd_batches(5, extra=False))
    options: dict[str, Any] = {"stage": stage, "bucket_cap_mb": 0.0005, "offload": offload}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, fused=True, **options)
    with in_a_stream(device):
        train(model, optimizer, batches[:2])
        with nobody_waits(device):
            train(model, optimizer, batches[2:])
        optimizer.close()
    if device != "cpu":
        torch.cuda.synchronize()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), batches)
    assert_same_model(model, plain)


@STAGES
def test_a_backward_inside_a_backward_is_refused_with_the_reason(device: str, stage: int) -> None:
    """On a GPU both run in a thread of autograd's own."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    optimizer = ZeroOptimizer(model, stage=stage)
    inputs = torch.ones(1, 3, requires_grad=True, device=device)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model[1](checkpoint(model[0], inputs, use_reentrant=True)).sum().backward()
    optimizer.zero_grad()
    model[1](checkpoint(model[0], inputs, use_reentrant=False)).sum().backward()
    optimizer.step()


def edited(group: dist.ProcessGroup, rank: int, device: str) -> tuple[str, nn.Module]:
    """Edit past the version counter, on every rank, in a block that only reads."""
    with deterministic():
        model, batches = build().to(device), share(on(device, odd_batches(4, extra=False)), rank, 2)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, process_group=group, lr=1e-2)
        with optimizer.gathered():
            model.layers[0].weight.data.mul_(2)
        with pytest.raises(RuntimeError) as caught:
            optimizer.clip_grad_norm_(1.0)
        train(model, optimizer, batches)
        optimizer.close()
    return str(caught.value), model.cpu()


def test_an_edit_that_no_version_shows_is_told_on_every_rank(ranks: Ranks) -> None:
    results = ranks.run(edited, ranks.device, world_size=2)
    plain, batches = build().to(ranks.device), on(ranks.device, odd_batches(4, extra=False))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with deterministic():
        for step in range(2):
            plain_step(plain, optimizer, odd_loss, batches[2 * step : 2 * step + 2], 2)
            plain.zero_grad()
    for message, model in results:
        assert "'layers.0.weight' was edited while its unit was gathered" in message
        assert_same_model(model, plain)


@pytest.mark.parametrize("further", ["zeroed", "added"])
def test_means_that_a_rank_holds_whole_may_be_zeroed_and_not_edited_and_added_to(device: str, further: str) -> None:
    model, plain, batches = build().to(device), build().to(device), on(device, odd_batches(2, extra=False))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=0, lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for each, theirs in ((model, optimizer), (plain, reference)):
        odd_loss(each, batches[0]).backward()
        if further == "zeroed":
            theirs.step()
            for parameter in each.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.zero_()
            odd_loss(each, batches[1]).backward()
            theirs.step()
    if further == "zeroed":
        assert_same_model(model, plain)
        return
    model.last.weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match=r"the gradient of 'last.weight' was edited after a backward"):
        odd_loss(model, batches[1]).backward()
