"""A rank enters and leaves its process group, and ends with the process that started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from zero.runtime import process_group

from ...support import pool
from ...support.pool import WITHOUT_GLOO

LIMIT = 60  # seconds

RANK = """
import os, sys, time
import torch.distributed as dist
import zero
with zero.process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1):
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.timeout(LIMIT)
def test_a_rank_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """If a launcher has started it: another one lives on, as a process that was started with nohup should."""
    started, ranks = list[Any](), list[int]()
    for name in ("TORCHELASTIC_RUN_ID", "NO_LAUNCHER"):
        environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"} | {name: "job"}
        command = [sys.executable, "-c", PARENT, RANK, str(tmp_path / name)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment))
    try:
        for parent in reversed(started):  # the launched one at last
            ranks.append(int(parent.stdout.readline()))
            parent.kill()
            parent.wait()
        outputs = [parent.stdout for parent in started]  # the rank holds the other end until it ends
        ended, _, _ = select.select(outputs, [], [], LIMIT / 2)
        assert ended == outputs[:1]
        assert outputs[0].read() == b""
    finally:
        for parent in started:
            parent.kill()
            parent.stdout.close()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("backend", ["gloo", WITHOUT_GLOO])
def test_ranks_that_do_not_meet_end_with_code_1(backend: str, tmp_path: Path) -> None:
    """Also with a backend whose ranks meet at their first collective only, such as NCCL."""
    code = (
        f"import sys, torch.distributed as dist, {process_group.__name__} as module\n"
        f"import {pool.__name__}; {pool.__name__}.register_unmoving()\n"
        "module.MEETING = 1.0\n"
        f"with module.process_group({backend!r}, store=dist.FileStore(sys.argv[1], 2), rank=0, world_size=2): pass"
    )
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job", "RANK": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert (found.returncode, found.stderr) == (1, "error: rank 0: the ranks have not met after 1 s\n")


BESIDE = """
import gc, os, sys, time
from contextlib import suppress
from datetime import timedelta
import torch, torch.distributed as dist
from tests.support.pool import WITHOUT_GLOO, register_unmoving
from zero import ZeroOptimizer
register_unmoving()

def sockets():
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself, which is closed by now
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found

left = []  # what torch keeps, and no more
rank, store = int(sys.argv[2]), dist.FileStore(sys.argv[1], 2)
for limit in (30, 30, 3):  # three lives in one store
    dist.init_process_group(WITHOUT_GLOO, timeout=timedelta(seconds=limit), store=store, rank=rank, world_size=2)
    if limit == 30:
        optimizer = ZeroOptimizer(torch.nn.Linear(2, 2))
        dist.destroy_process_group()
        optimizer.close()
        del optimizer
        gc.collect()
        left.append(sockets())
        assert left[0] == left[-1]
if rank == 0:
    began = time.monotonic()
    try:
        ZeroOptimizer(torch.nn.Linear(2, 2))
    except RuntimeError as error:
        print(time.monotonic() - began < 20, error)
"""


@pytest.mark.timeout(LIMIT)
def test_the_gloo_group_beside_another_backend_outlives_it_and_is_an_error_in_time_if_a_rank_is_gone(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", BESIDE, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    first, second = (rank.communicate(timeout=LIMIT)[0] for rank in ranks)
    assert ([rank.returncode for rank in ranks], second) == ([0, 0], "")
    said = "rank 0: the process group's backend is 'cuda:unmoving'. The gloo group beside it, for short messages, "
    assert first.startswith(f"True {said}")
    assert "did not come within 3 s or cannot be reached (no answer from rank 1)" in first
