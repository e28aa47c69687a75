"""Without a launcher a rank outlives its parent, and one that meets no other ends with a code and a word."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero.runtime import process_group

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
def test_without_a_launcher_a_rank_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    """As a process that was started with nohup should."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    command = [sys.executable, "-c", PARENT, RANK, str(tmp_path / "store")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment)
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    ended, _, _ = select.select([parent.stdout], [], [], 1)
    parent.stdout.close()
    assert not ended
    os.kill(rank, signal.SIGKILL)


@pytest.mark.timeout(LIMIT)
def test_ranks_that_do_not_meet_end_with_code_1(tmp_path: Path) -> None:
    code = (
        f"import sys, torch.distributed as dist, {process_group.__name__} as module\n"
        "module.MEETING = 1.0\n"
        "with module.process_group('gloo', store=dist.FileStore(sys.argv[1], 2), rank=0, world_size=2): pass"
    )
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job", "RANK": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert (found.returncode, found.stderr) == (1, "error: rank 0: the ranks have not met after 1 s\n")
