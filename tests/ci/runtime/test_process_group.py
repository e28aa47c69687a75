"""A rank enters and leaves its process group, and ends with the process that started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
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
def test_a_rank_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """If a launcher has started it: another one lives on, as a process that was started with nohup should."""
    started, ranks = [], []
    for launched in (True, False):
        environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
        environment |= {"TORCHELASTIC_RUN_ID": "job"} if launched else {}
        command = [sys.executable, "-c", PARENT, RANK, str(tmp_path / f"store{launched}")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment))
    try:
        for parent in reversed(started):  # the launched one at last
            assert parent.stdout is not None
            ranks.append(int(parent.stdout.readline()))
            parent.kill()
            parent.wait()
        outputs = [parent.stdout for parent in started]  # the rank holds the other end until it ends
        ended, _, _ = select.select(outputs, [], [], LIMIT / 2)
        assert ended == outputs[:1]
        assert outputs[0] is not None
        assert outputs[0].read() == b""
    finally:
        for parent in started:
            assert parent.stdout is not None
            parent.kill()
            parent.stdout.close()
        for rank in ranks:
            with suppress(ProcessLookupError):
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
