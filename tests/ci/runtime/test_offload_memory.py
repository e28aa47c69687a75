"""With states on disk two buckets at most are resident, and private memory falls by the states.

Each measurement is that of a process of its own.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def held(folder: str, stage: int, precision: str, meeting: str, rank: int, factor: int) -> dict[str, int]:
    """Train in this process. Return the most that was mapped at any time, and the private bytes after.

    ``meeting``: the file of the rendezvous of two ranks, if there are two.
    """
    torch.set_num_threads(1)
    if meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    optimizer = ZeroOptimizer(
        model := nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS))),
        torch.optim.AdamW,
        stage=stage,
        fused=True,
        bucket_cap_mb=1.0,
        mixed_precision=PRECISIONS[precision] if precision else None,
        offload=Offload(folder) if folder else None,
        sharding_factor=factor,
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


def in_processes(each: Sequence[tuple[Any, ...]]) -> list[dict[str, int]]:
    """Call `held` in one process for each of ``each``; return the results."""
    codes = [f"from {__name__} import held; print(held(*{arguments!r}))" for arguments in each]
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for code in codes
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, said, strict=True):
        assert process.returncode == 0, error
    return [eval(output.splitlines()[-1]) for output, _ in said]


@pytest.mark.parametrize("row", [(1, 1, "", 1), (1, 3, "bf16", 1), (2, 2, "", 2)], ids=str)
def test_two_buckets_at_most_are_resident(row: Any, tmp_path: Path) -> None:
    """Each rank's by the states of its share."""
    ranks, stage, precision, factor = row

    def found(folder: str) -> list[dict[str, int]]:
        meeting = str(tmp_path / f"meeting{bool(folder)}") if ranks == 2 else ""
        return in_processes([(folder, stage, precision, meeting, rank, factor) for rank in range(ranks)])

    (folder := tmp_path / "states").mkdir()
    share = (12 if precision else 8) * PSI // factor
    for kept, beside in zip(found(str(folder)), found(""), strict=True):
        assert (kept["offloaded"], beside["offloaded"], kept["left"]) == (share, 0, 0)
        assert kept["buckets"] >= 4
        assert 0 < kept["most"] <= 2 * share // kept["buckets"]
        fallen = beside["private"] - kept["private"]
        assert abs(fallen - share) <= 0.05 * share + 2 * MIB, (fallen, share)
    assert list(folder.iterdir()) == []
