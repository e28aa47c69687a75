"""What a save and a load add to the peak of a process: no copy of the states, whatever the stage and the precision."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero import CheckpointManager, MixedPrecision, ZeroOptimizer

from ...support.pool import GlooPool

MIB = 1 << 20
LAYERS, WIDTH = 8, 1024
BLOCKS = 4 * 4  # MiB: of each thread that reads, one
MMAP_THRESHOLD = -3  # the number of this setting in glibc's malloc.h


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """Let glibc give large memory back when it is freed: else holes of its heap count, some runs more than 10 MiB."""
    glibc = ctypes.CDLL(None)
    assert glibc.mallopt(MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        glibc.mallopt(MMAP_THRESHOLD, 32 << 20)  # where the default ends in a process that frees as much


def _added(action: Callable[[], object]) -> int:
    """Return what a call adds to the resident bytes of this process at their peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the current value
    before = _resident("VmRSS")
    action()
    return _resident("VmHWM") - before


@_freed_at_once()
def _process(group: dist.ProcessGroup, rank: int, stage: int, narrow: bool, path: str) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    precision = MixedPrecision(torch.bfloat16) if narrow else None
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, process_group=group, lr=1e-3, bucket_cap_mb=4, mixed_precision=precision
    )

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with CheckpointManager(path, optimizer, max_to_keep=1) as checkpoints:
        step()
        checkpoints.save(1, blocking=True)  # what a first save imports and allocates for good
        saved = _added(lambda: checkpoints.save(2, blocking=True))
        loaded = _added(checkpoints.restore)
    optimizer.close()
    return saved, loaded


@pytest.mark.parametrize(("stage", "narrow"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_save_adds_the_parameters_and_a_load_a_few_blocks(
    gloo: GlooPool, stage: int, narrow: bool, tmp_path: Path
) -> None:
    numel = LAYERS * WIDTH * (WIDTH + 1) // 2  # of a rank
    for saved, loaded in gloo.run(_process, stage, narrow, str(tmp_path), ranks=(0, 1)):
        assert saved <= numel * (2 if narrow else 4) + 8 * MIB, f"{saved / MIB:.1f} MiB"
        assert loaded <= BLOCKS * MIB + 2 * MIB, f"{loaded / MIB:.1f} MiB"
