"""The plain loop on a GPU, bit for bit: one rank with NCCL, and several ranks on one GPU over gloo.

Each test also runs on the CPU, where everything specific to a GPU does nothing. That only shows that the test's code
works on machines without a GPU. The plain loop runs on the same device, with torch's deterministic algorithms. Ranks
are processes: autograd runs the backwards of all threads of a process on one GPU in one thread, where a rank would wait
for the others forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero import Offload, ZeroOptimizer

from ..support.devices import DEVICES, GPU, deterministic, deterministic_products, on, whole_program
from ..support.models import build, odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.pairs import Row, pair_rows
from ..support.plain import assert_same_model, assert_same_states
from ..support.pool import GlooPool
from ..support.programs import Program, compare
from ..support.rows import rows
from .space import HABITS

ON_GPU = DEVICES[1]


@pytest.fixture(scope="module")
def spawned() -> Iterator[GlooPool]:
    """Return processes for a GPU: a fork of a process that may have used CUDA cannot use it."""
    pool = GlooPool("spawn")
    with deterministic_products():
        yield pool
    pool.stop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> GlooPool:
    """Return processes for the device of a test."""
    pool: GlooPool = request.getfixturevalue("gloo" if request.getfixturevalue("device") == "cpu" else "spawned")
    return pool


@pytest.fixture
def alike() -> Iterator[None]:
    """Set up torch for deterministic results."""
    with deterministic_products(), deterministic():
        yield


# -- programs ----------------------------------------------------------------------------------------------------------

NUMBERS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"precision": PRECISIONS["bf16"]},
    "fp16": {"precision": PRECISIONS["fp16"]},
    "in bf16": {"dtype": torch.bfloat16},
}


def allowed(row: Row) -> bool:
    """Return whether the settings of a row go together."""
    whole = row["numbers"] == "in bf16"
    return (
        (row["habit"] != "fewer" or (row["stage"] < 3 and row["ranks"] > 1))
        and not (whole and (row["optimizer"] != "adamw" or row["habit"] == "scales"))
        and (row["numbers"] != "fp16" or row["optimizer"] in ("adamw", "adamw fused"))
    )


ROWS = pair_rows(
    {
        "stage": (0, 1, 2, 3),
        "ranks": (1, 2, 3),
        "cap": (25.0, 0.0005, 1e-6),
        "optimizer": ("adamw", "adamw fused", "adamw foreach", "adamw for-loop"),
        "habit": ("norms", "no sync", "freezes", "divisors", "fewer", "zeros", "scales"),
        "numbers": tuple(NUMBERS),
        "collective": ("auto", "pairwise"),
        "offload": (None, Offload("cpu")),
        "lends": (False, True),
    },
    allowed,
)


def program_of(row: Row, device: str) -> Program:
    return Program(
        *(row[name] for name in ("ranks", "stage", "optimizer", "cap", "collective")),
        **NUMBERS[row["numbers"]],
        **{name: row[name] for name in ("offload", "lends")},
        device=device,
        scaled=row["habit"] == "scales",
        steps=HABITS[row["habit"]],
    )


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


@pytest.mark.parametrize(
    ("device", "row"),
    [
        *(("cpu", row) for row in rows(ROWS[:1], ROWS[18::18])),
        *(pytest.param(GPU, row, marks=ON_GPU.marks) for row in ROWS),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_programs_give_the_bits_of_the_plain_loop_on_the_same_device(ranks: GlooPool, device: str, row: Row) -> None:
    program = program_of(row, device)
    run = beside_nccl if program.world_size == 1 else whole_program
    results = ranks.run(run, program, ranks=range(program.world_size), limit=100)
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


@pytest.mark.law("host synchronisation")
@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:offload")
def test_a_step_lets_the_host_run_ahead(device: str) -> None:
    """This holds after the first two steps, which create states, on another stream than that of the construction."""
    for stage, offload in ((0, None), (1, Offload("cpu")), (2, None), (2, Offload("cpu")), (3, None)):
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


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_inside_a_backward_is_refused_with_the_reason(device: str) -> None:
    """On a GPU both run in a thread of autograd's own."""
    from torch.utils.checkpoint import checkpoint

    for stage in range(4):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
        optimizer = ZeroOptimizer(model, stage=stage)
        inputs = torch.ones(1, 3, requires_grad=True, device=device)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            model[1](checkpoint(model[0], inputs, use_reentrant=True)).sum().backward()
        optimizer.zero_grad()
        model[1](checkpoint(model[0], inputs, use_reentrant=False)).sum().backward()
        optimizer.step()
