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

import pytest
import torch
from torch import Tensor, nn

from zero import Offload, ZeroOptimizer
from zero.runtime.offload import DiskOffload

from ...support.narrowed import PRECISIONS
from ...support.parts import parts_of

MIB = 1 << 20
BUCKETS, WIDTH = 8, 512  # buckets of 1 MiB: a matrix of WIDTH x WIDTH in fp32
PSI = BUCKETS * WIDTH * WIDTH


def mapped(folder: str) -> int:
    """Return the resident bytes of this process's mapped files without a name that were made in ``folder``."""
    found = rf"{re.escape(folder)}.* \(deleted\)\n(?:.*\n)*?Rss: +(\d+) kB" if folder else "(nothing)"
    return sum(int(size) * 1024 for size in re.findall(found, Path("/proc/self/smaps").read_text()))


def held(folder: str, stage: int, precision: str) -> tuple[int, ...]:
    """Train in this process. Return the most that was mapped at any time and at the end, the private bytes without
    memory that the allocator keeps, the bytes of states that are elsewhere, and the number of buckets."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)))
    offload = Offload(folder) if folder else None
    more = {"fused": True, "bucket_cap_mb": 1.0, "mixed_precision": PRECISIONS.get(precision), "offload": offload}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **more)  # type: ignore[arg-type]
    most, evict = [0], DiskOffload.evict

    def look_and_leave(spool: DiskOffload, tensors: Iterable[Tensor]) -> None:
        """Measure when a bucket is evicted, after the prefetch of the next one: this is when most is mapped."""
        for coming in spool._coming.values():
            coming.result()
        most.append(mapped(folder))
        evict(spool, tensors)

    DiskOffload.evict = look_and_leave  # type: ignore[method-assign]
    for _ in range(4):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    ctypes.CDLL(None).malloc_trim(0)
    private = re.findall(r"Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    elsewhere, buckets = optimizer.describe().offloaded_bytes, len(parts_of(optimizer).storage.layout.buckets)
    return max(most), mapped(folder), sum(map(int, private)) * 1024, elsewhere, buckets


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("stage", "precision"), [(1, ""), (3, "bf16")])
def test_two_buckets_at_most_are_resident(stage: int, precision: str, tmp_path: Path) -> None:
    found = []
    for folder in (str(tmp_path), ""):
        code = f"from {__name__} import held; print(held{(folder, stage, precision)!r})"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        found.append(eval(ended.stdout.splitlines()[-1]))
    (most, left, private, offloaded, buckets), (_, _, beside, nothing, _) = found
    share = (12 if precision else 8) * PSI
    assert (offloaded, nothing, left) == (share, 0, 0)
    assert buckets >= 4
    assert 0 < most <= 2 * share // buckets
    assert abs(beside - private - share) <= 0.05 * share + 2 * MIB, (beside, private, share)
    assert list(tmp_path.iterdir()) == []
