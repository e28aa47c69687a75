"""A rank enters and leaves its process group, and ends with the process that started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

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
    command = [sys.executable, "-c", PARENT, RANK, str(tmp_path / "store")]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job"}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment)
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        ended, _, _ = select.select([parent.stdout], [], [], LIMIT / 2)  # the rank holds the other end until it ends
        assert ended, "the rank lives on"
        assert parent.stdout.read() == b""
    finally:
        parent.stdout.close()
        if not ended:
            os.kill(rank, signal.SIGKILL)
