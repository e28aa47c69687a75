"""`--elastic MIN:MAX`: ranks of this host that may die while the job goes on.

Knows: the agents of torch's launcher, of which each keeps one rank alive, and the store in which they meet. Does not
know: what the ranks do, or how torch's agents agree.

    zero train --elastic 2:4 -> store, 4 x `python -m zero.commands.elastic FLAGS` (torchrun)
                                         -> `python -m zero.commands.train.rank SETTINGS`, again after each change
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ..runtime.process_group import end_with_parent
from .runner import StoppedError, fail, silence_agent

__all__ = ["RENDEZVOUS", "launch_elastic"]

RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
MOST_RESTARTS = 100  # of an agent's rank; each death of a rank counts for all agents
LEAVE = 40.0  # seconds in which agents must end; each gives its rank 30
PAUSE = 0.1  # seconds between two looks at the agents


class ElasticError(Exception):
    """Too few ranks are left. ``trace``: the traceback of the last error of a rank, empty if there is none."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


def launch_elastic(module: str, settings: Mapping[str, Any], least: int, most: int) -> None:
    """Run `python -m module SETTINGS` on ``most`` ranks of this host, and go on while ``least`` are left. Returns when
    the ranks have ended by themselves.

    Raises:
        ElasticError: too few ranks are left.
        StoppedError: this process got SIGTERM or SIGINT; the ranks were asked to end.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # lives as long as this call
    with _stop_signals() as asked, tempfile.TemporaryDirectory(prefix="zero-elastic-") as folder:  # torch's would stay
        agents = _started(module, settings, least, most, f"localhost:{store.port}", folder)
        try:
            left = _watch(agents, least, asked)
        finally:
            _end(agents)
        if left is not None:
            line, trace = _last_error(Path(folder))  # all have ended, so the last error has been written
            after = f"; the last error: {line}" if line else ""
            raise ElasticError(f"{left} of {most} ranks are left, and --elastic asks for {least}{after}", trace)


def _started(
    module: str, settings: Mapping[str, Any], least: int, most: int, endpoint: str, folder: str
) -> list[subprocess.Popen[bytes]]:
    """Start the agents, which meet at an endpoint and keep the errors of their ranks in a folder."""
    flags = {
        "nnodes": f"{least}:{most}",
        "nproc-per-node": 1,
        "max-restarts": MOST_RESTARTS,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": endpoint,
        "rdzv-id": f"elastic-{uuid.uuid4()}",
        "rdzv-conf": RENDEZVOUS,
        "local-addr": "localhost",
        "log-dir": folder,
    }
    command = [sys.executable, "-m", __name__, *(f"--{name}={value}" for name, value in flags.items())]
    command += ["-m", module, json.dumps(settings)]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # a store for each restart, at its rank 0
    return [subprocess.Popen(command, env=environment, start_new_session=True) for _ in range(most)]


def _watch(agents: Sequence[subprocess.Popen[bytes]], least: int, asked: Sequence[signal.Signals]) -> int | None:
    """Return None when all agents have ended, at least one with code 0; or how many are left, once they are too few.

    Raises:
        StoppedError: as `launch_elastic`.
    """
    gone: set[int] = set()
    while not asked:
        codes = {agent.pid: agent.poll() for agent in agents}
        left = sum(code is None for code in codes.values())
        for pid, code in codes.items():
            if code and pid not in gone:
                gone.add(pid)
                print(f"an agent has ended with code {code}; left: {left}", file=sys.stderr, flush=True)
        if 0 in codes.values():
            if not left:
                return None
        elif left < least:
            return left
        time.sleep(PAUSE)
    raise StoppedError(f"got {asked[0].name}: the ranks have been asked to save and end; the same command goes on")


def _last_error(folder: Path) -> tuple[str, str]:
    """Return the newest error of a rank, in one line, and its traceback; two empty texts if there is none."""
    found = []
    for path in folder.rglob("error.json"):
        with suppress(ValueError, KeyError, TypeError):  # half written, or not by `record_error`
            found.append(json.loads(path.read_text())["message"]["extraInfo"])
    newest = max(found, key=lambda details: float(details["time"]), default={"line": "", "py_callstack": ""})
    return newest["line"], newest["py_callstack"]


def _end(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to the agents that are left; kill those that have not ended after `LEAVE`."""
    for agent in agents:
        agent.terminate()
    end = time.monotonic() + LEAVE
    for agent in agents:
        try:
            agent.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


@contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGTERM and SIGINT in a list, instead of ending."""
    asked: list[signal.Signals] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _agent(arguments: Sequence[str]) -> int:
    """Run one agent, which ends its rank and itself if this job ends in any way. Return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main

    end_with_parent(signal.SIGTERM)
    silence_agent()
    try:
        main(arguments)
    except ChildFailedError:
        return 1  # the rank has printed its error
    except RendezvousError as error:
        return fail(error)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(_agent(sys.argv[1:]))
