"""With states on disk two buckets at most are resident, and private memory falls by the states.

Each measurement is that of a process of its own.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import Offload, ZeroOptimizer
from zero.runtime.offload import DiskOffload

from ...support.narrowed import PRECISIONS
from ...support.parts import parts_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1 << 20
BUCKETS, WIDTH = 8, 512  # buckets of 1 MiB: a matrix of WIDTH x WIDTH in fp32
PSI = BUCKETS * WIDTH * WIDTH


def mapped(folder: str) -> int:
    """Return the resident bytes of this process's mapped files without a name that were made in ``folder``."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith("(deleted)") and folder in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def private() -> int:
    """Return the bytes of this process alone, without memory that its allocator keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous:"))


def held(folder: str, stage: int, precision: str) -> dict[str, int]:
    """Train in this process. Return the most that was mapped at any time, and the private bytes after."""
    torch.set_num_threads(1)
    optimizer = ZeroOptimizer(
        model := nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS))),
        torch.optim.AdamW,
        stage=stage,
        fused=True,
        bucket_cap_mb=1.0,
        mixed_precision=PRECISIONS[precision] if precision else None,
        offload=Offload(folder) if folder else None,
    )
    most, evict = 0, DiskOffload.evict

    def look_and_leave(spool: DiskOffload, tensors: Iterable[Tensor]) -> None:
        """Measure when a bucket is evicted, after the prefetch of the next one: this is when most is mapped."""
        nonlocal most
        for coming in spool._coming.values():
            coming.result()
        most = max(most, mapped(folder))
        evict(spool, tensors)

    DiskOffload.evict = look_and_leave  # type: ignore[method-assign]
    for _ in range(4):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    found = {"most": most, "private": private(), "offloaded": optimizer.describe().offloaded_bytes}
    buckets = len(parts_of(optimizer).storage.layout.buckets)
    return {**found, "left": mapped(folder) if folder else 0, "buckets": buckets}


def in_process(*arguments: Any) -> dict[str, int]:
    """Call `held` in a process of its own."""
    code = f"from {__name__} import held; print(held(*{arguments!r}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    kept: dict[str, int] = eval(found.stdout.splitlines()[-1])
    return kept


@pytest.mark.parametrize(("stage", "precision"), [(1, ""), (3, "bf16")])
def test_two_buckets_at_most_are_resident(stage: int, precision: str, tmp_path: Path) -> None:
    (folder := tmp_path / "states").mkdir()
    share = (12 if precision else 8) * PSI
    kept, beside = (in_process(where, stage, precision) for where in (str(folder), ""))
    assert (kept["offloaded"], beside["offloaded"], kept["left"]) == (share, 0, 0)
    assert kept["buckets"] >= 4
    assert 0 < kept["most"] <= 2 * share // kept["buckets"]
    fallen = beside["private"] - kept["private"]
    assert abs(fallen - share) <= 0.05 * share + 2 * MIB, (fallen, share)
    assert list(folder.iterdir()) == []
