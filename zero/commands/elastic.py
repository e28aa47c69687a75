"""`--elastic MIN:MAX`: ranks of this host that may die, leave and come while the job goes on.

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
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..runtime.process_group import end_with_parent
from .runner import StoppedError, silence_agent

__all__ = ["RENDEZVOUS", "launch_elastic"]

RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
MOST_RESTARTS = 100  # of one rank
PATIENCE = 40.0  # seconds for agents to leave; each gives its rank 30
PAUSE = 0.1  # seconds between two looks at the agents


def launch_elastic(module: str, settings: Mapping[str, Any], least: int, most: int) -> None:
    """Run `python -m module SETTINGS` on ``most`` ranks of this host, and go on while ``least`` are left. Returns when
    the ranks have ended by themselves.

    Raises:
        RuntimeError: too few ranks are left.
        StoppedError: this process got SIGTERM or SIGINT; the ranks were asked to end.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # lives as long as this call
    with tempfile.TemporaryDirectory(prefix="zero-elastic-") as folder:  # torch's own would stay
        agents = _started(module, settings, least, most, f"localhost:{store.port}", folder)
        try:
            with _stop_signals() as asked:
                _watch(agents, least, asked)
        finally:
            _end(agents)


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


def _watch(agents: Sequence[subprocess.Popen[bytes]], least: int, asked: list[signal.Signals]) -> None:
    """Return when an agent has ended well and none is left. Raises as `launch_elastic`."""
    gone: set[int] = set()
    while not asked:
        codes = {agent.pid: agent.poll() for agent in agents}
        for pid, code in codes.items():
            if code and pid not in gone:
                gone.add(pid)
                left = sum(other is None for other in codes.values())
                print(f"an agent has ended with code {code}; left: {left}", file=sys.stderr, flush=True)
        running = sum(code is None for code in codes.values())
        if 0 in codes.values():
            if not running:
                return
        elif running < least:
            raise RuntimeError(f"{running} of {len(agents)} ranks are left, and --elastic asks for {least}")
        time.sleep(PAUSE)
    raise StoppedError(f"got {asked[0].name}: the ranks have been asked to save and end; the same command goes on")


def _end(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the agents that are left to end, and kill those that do not."""
    for agent in agents:
        agent.terminate()
    end = time.monotonic() + PATIENCE
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
    from torch.distributed.run import main

    end_with_parent(signal.SIGTERM)
    silence_agent()
    try:
        main(arguments)
    except ChildFailedError:
        return 1  # the rank has printed its error
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(_agent(sys.argv[1:]))
