"""The plain loop on a GPU, bit for bit: one rank with NCCL, and several ranks on one GPU over gloo.

Each test also runs on the CPU, where everything specific to a GPU does nothing. That only shows that the test's code
works on machines without a GPU. The plain loop runs on the same device, with torch's deterministic algorithms. Ranks
are processes: autograd runs the backwards of all threads of a process on one GPU in one thread, where a rank would wait
for the others forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero import Offload, ZeroOptimizer

from ..dials import loops
from ..dials.record import config_with
from ..support.devices import DEVICES, GPU, OnDevice, RankOnDevice, deterministic, deterministic_products, on
from ..support.machine.program import Config, Lend, Scaled, Setting, ZeroGrad
from ..support.machine.ranks import Saved
from ..support.machine.run import run
from ..support.models import build, odd_batches, take_steps
from ..support.pairs import Row, pair_rows
from ..support.plain import assert_same_model
from ..support.pool import GlooPool
from ..support.rows import rows

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
    with deterministic_products(), deterministic():
        yield


KNOWN = loops.DIALS[0].values
LOOPS: dict[str, Any] = {
    **{name: KNOWN[name] for name in ("norms", "no sync", "freezes", "divisors", "uneven", "clears, zeros")},
    "scaled": [Scaled(1), Scaled(2, overflow=1), Scaled(3, unscale=False), *loops.step(4)],
}
NUMBERS = {"": {}, "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"}, "in bf16": {"dtype": "bfloat16"}}


def allowed(row: Row) -> bool:
    """Return whether the settings of a row go together."""
    whole = row["numbers"] == "in bf16"
    return (
        (row["loop"] != "uneven" or row["stage"] < 3)
        and (row["loop"] != "clears, zeros" or not row["lends"])  # zeros that no step used do not move
        and not (whole and (row["optimizer"] != "adamw" or row["loop"] == "scaled"))
        and (row["numbers"] != "fp16" or row["optimizer"] in ("adamw", "adamw fused"))
    )


ROWS = pair_rows(
    {
        "stage": (0, 1, 2, 3),
        "world_size": (1, 2, 3),
        "bucket_cap_mb": (25.0, 0.0005, 1e-6),
        "optimizer": ("adamw", "adamw fused", "adamw foreach", "adamw for-loop"),
        "loop": tuple(LOOPS),
        "numbers": tuple(NUMBERS),
        "collective": ("auto", "pairwise"),
        "offload": (False, "states on the host"),
        "lends": (False, True),
    },
    allowed,
)
OF_CONFIG = ("stage", "world_size", "bucket_cap_mb", "optimizer", "collective", "offload")


class RankBesideNccl(RankOnDevice):
    """A rank in a group of itself alone, whose tensors NCCL transfers if they are on a GPU."""

    def __init__(self, config: Config, setting: Setting, group: Any, rank: int, saved: Saved | None = None) -> None:
        backend = "nccl" if config.device.startswith("cuda") else "gloo"
        alone = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
        summed = torch.ones(3, device=config.device)
        dist.all_reduce(summed, group=alone)
        assert summed.tolist() == [1.0] * 3
        super().__init__(config, setting, alone, rank, saved)

    def close(self) -> list[torch.Tensor]:
        found = super().close()
        dist.destroy_process_group(self.group)
        return found


class BesideNccl(OnDevice):
    rank = RankBesideNccl


@pytest.mark.parametrize(
    ("device", "row"),
    [
        *(("cpu", row) for row in rows(ROWS[:1], ROWS[18::18])),
        *(pytest.param(GPU, row, marks=ON_GPU.marks) for row in ROWS),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_programs_give_the_bits_of_the_plain_loop_on_the_same_device(ranks: GlooPool, device: str, row: Row) -> None:
    config = config_with({**NUMBERS[row["numbers"]], **{name: row[name] for name in OF_CONFIG}, "device": device})
    lend = [Lend()] if row["lends"] else []
    commands = [each for command in LOOPS[row["loop"]] for each in (command, *lend * isinstance(command, ZeroGrad))]
    backend = BesideNccl if row["world_size"] == 1 else OnDevice
    with deterministic():
        run(config, *commands, backend=backend(ranks))


@contextmanager
def nobody_waits(device: str) -> Iterator[None]:
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_a_stream(device: str) -> AbstractContextManager[Any]:
    if not device.startswith("cuda"):
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@pytest.mark.law("host synchronisation")
@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:offload")
def test_a_step_lets_the_host_run_ahead(device: str) -> None:
    for stage, offload in ((0, None), (1, Offload("cpu")), (2, None), (2, Offload("cpu")), (3, None)):
        model, plain, batches = build().to(device), build().to(device), on(device, odd_batches(5, extra=False))
        options: dict[str, Any] = {"stage": stage, "bucket_cap_mb": 0.0005, "offload": offload}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, fused=True, **options)
        with in_a_stream(device):
            take_steps(model, optimizer, batches[:2])
            with nobody_waits(device):
                take_steps(model, optimizer, batches[2:])
            optimizer.close()
        if device != "cpu":
            torch.cuda.synchronize()
        take_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), batches)
        assert_same_model(model, plain)


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_inside_a_backward_is_refused_with_the_reason(device: str) -> None:
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
