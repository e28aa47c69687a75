"""`python -m benchmarks.elastic`: from the death of a rank to the first new step, beside workers that train nothing.

Knows: torchrun's agents, signals, the folder of checkpoints. Does not know: how ranks meet again. Each round kills the
same ranks of two jobs, one after the other: of `zero train`, with a checkpoint after every ten steps, and of workers
that import torch and this library and enter the process group (`elastic_worker`). For `zero train` it is the time until
a checkpoint of the new ranks is complete, so up to ten steps more than until their first step. (With a save under way
at the kill, ranks try for 2 seconds to complete it.)
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from zero.checkpoint.folder.directory import steps_in
from zero.commands.elastic import RENDEZVOUS

from . import tables
from .report import Report
from .tables import Table

RANKS, GOAL = 3, 3.0  # seconds more than the bare workers
LIMIT = 120.0  # seconds until a job has begun, and until it goes on
PAUSE = 0.01
BARE, ZERO = "bare workers", "zero train"
KILLS = ("a worker", "an agent and its worker")
_IN_GROUP = re.compile(r"in the group at ([\d.]+), of (\d+)")


class Agents:
    """Agents of torchrun on this host, each with one worker."""

    def __init__(self, module: Sequence[str], folder: Path) -> None:
        self.log = folder / "log"
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{RANKS}", "--nproc-per-node=1"),
            *("--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._store.port}"),
            *(f"--rdzv-id={uuid.uuid4()}", f"--rdzv-conf={RENDEZVOUS}", "--local-addr=localhost", "-m", *module),
        ]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log.open("w") as log:
            self._agents = [
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                for _ in range(RANKS)
            ]

    def kill(self, what: str) -> float:
        """Kill the worker of the first agent, or both. Return when, in seconds of the clock."""
        agent = self._agents[0]
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        now = time.time()
        for pid in [*map(int, workers), *([agent.pid] if what == KILLS[1] else [])]:
            os.kill(pid, signal.SIGKILL)
        return now

    def wait(self, found: Callable[[], float | None]) -> float:
        """Return what ``found`` returns once it is not None."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            value = found()
            if value is not None:
                return value
            time.sleep(PAUSE)
        raise RuntimeError(f"the job hangs:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            agent.wait()


@contextmanager
def agents(module: Sequence[str], folder: Path) -> Iterator[Agents]:
    started = Agents(module, folder)
    try:
        yield started
    finally:
        started.stop()


def bare(what: str, folder: Path) -> float:
    """Return the seconds from the kill until the last worker is in the new group."""
    left = RANKS if what == KILLS[0] else RANKS - 1
    with agents(["benchmarks.elastic_worker"], folder) as job:

        def last(count: int, size: int) -> float | None:
            times = [float(when) for when, world in _IN_GROUP.findall(job.log.read_text()) if int(world) == size]
            return max(times) if len(times) >= count else None

        job.wait(lambda: last(RANKS, RANKS))
        time.sleep(1.0)
        killed = job.kill(what)
        return job.wait(lambda: last(2 * RANKS if left == RANKS else left, left)) - killed


def training(what: str, folder: Path) -> float:
    """Return the seconds from the kill until a step of the new ranks is complete, and saved."""
    saved = folder / "saved"
    flags = [f"--checkpoint={saved}", "--checkpoint-every=10", "--keep=2", "--resume=auto", f"--out={folder / 'out'}"]
    with agents(["zero.train", "--preset=tiny", "--steps=100000", *flags], folder) as job:
        job.wait(lambda: 1.0 if max(steps_in(saved), default=0) >= 10 else None)
        time.sleep(1.0)
        holder = _nonce(saved)
        killed = job.kill(what)
        job.wait(lambda: 1.0 if _nonce(saved) not in (holder, None) else None)
        newest = max(steps_in(saved))
        return job.wait(lambda: time.time() if max(steps_in(saved), default=0) > newest else None) - killed


def _nonce(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / ".lock").read_text())["nonce"])
    except (OSError, ValueError, KeyError):
        return None


def main(
    rounds: Annotated[int, typer.Option(help="How many rounds.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for elastic.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Seconds from the death of a rank to the first new step."""
    console = tables.console(stderr=markdown)
    seconds: dict[tuple[str, str], list[float]] = {(name, what): [] for name in (BARE, ZERO) for what in KILLS}
    with console.status("starting") as status:
        for number in range(rounds):
            for what in KILLS:
                for name, measure in ((BARE, bare), (ZERO, training)):
                    status.update(f"round {number + 1} of {rounds}: {name}, {what}")
                    with tempfile.TemporaryDirectory(prefix="zero-elastic-") as folder:
                        seconds[name, what].append(measure(what, Path(folder)))
    parts = [{"system": name, "killed": what, "seconds": found} for (name, what), found in seconds.items()]
    report = Report.of_this_machine("benchmarks.elastic", parts)
    report.write(out / "elastic.json")
    rows = []
    for what in KILLS:
        ours, theirs = (statistics.median(seconds[name, what]) for name in (ZERO, BARE))
        rows.append([what, f"{theirs:.1f}", f"{ours:.1f}", f"{ours - theirs:+.1f}", f"{GOAL:g}"])
    header = ("killed", BARE, ZERO, "more", "goal")
    tables.show(
        report.line(), [Table(f"seconds, medians of {rounds} rounds, {RANKS} ranks", header, rows)], markdown, console
    )


if __name__ == "__main__":
    typer.run(main)
