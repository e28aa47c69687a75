"""Runs of `zero train` under torchrun whose ranks die, leave and come at random moments.

    python -m tests.elastic [COUNT, by default 30] [SEED of the first, by default 0]

Each run has an agent of torchrun for each rank, all on this host, and a store that outlives them. At random moments a
worker, an agent or both are killed, an agent gets SIGTERM, or agents are added. Parameters, all losses and the content
of each checkpoint must be those of the undisturbed run; no process and no file may be left.

Knows: torchrun's flags, signals. Does not know: how ranks agree to leave, or how a checkpoint is written.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from zero.checkpoint.folder.directory import steps_in

from .resumes import ROOT, Cadence, TrainedRun, command_line, kill, outcome, processes, undisturbed, verified

RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"  # as in ELASTIC.md
CADENCE = Cadence(steps=60, micro_batches=7, every=10, more=("--batch=4",))
MOST = 5  # ranks
LIMIT = 600.0  # seconds for one run, on a machine that is busy; agents may wait for each other for 300 at the end
PAUSE = 0.05  # seconds between two looks
BLIND = 15.0  # seconds, about what ranks need to start
STOPPED = re.compile(r"stopped: rank (\d+) got SIGTERM: all ranks have saved step (\d+) and end")
BEGUN = re.compile(r"goes on from step (\d+) on (\d+) rank")


@dataclass(frozen=True)
class Agent:
    """An agent of torchrun, which keeps one worker alive."""

    process: subprocess.Popen[bytes]
    was_asked: list[bool] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def workers(self) -> list[int]:
        return list(processes(self.pid))

    def leave(self) -> None:
        """Send SIGTERM; the agent passes it on to its worker, and waits for it."""
        self.was_asked.append(True)
        self.process.terminate()


class ElasticJob:
    """A job under torchrun on this host: a store, and agents that may be added at any time."""

    def __init__(self, folder: Path, module: Sequence[str], directory: Path = ROOT) -> None:
        """``folder``: of the log. ``module``: what a worker runs, with its arguments, in a directory."""
        self.agents: list[Agent] = []
        self._folder, self._log, self._directory = folder, folder / "log", directory
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._end = time.monotonic() + LIMIT
        self._module, self._id = module, uuid.uuid4()
        self._temporary = folder / "temporary"
        self._temporary.mkdir(exist_ok=True)

    def start_anew(self, count: int) -> None:
        """Start the job again after all agents have ended: they closed the meeting of their ``--rdzv-id``."""
        self._id = uuid.uuid4()
        self.add(count)

    @property
    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{MOST}", "--nproc-per-node=1"),
            *("--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._store.port}"),
            *(f"--rdzv-id={self._id}", f"--rdzv-conf={RENDEZVOUS}", "--local-addr=localhost"),
            *self._module,
        ]

    def folders(self) -> list[str]:
        """Return the folders of all agents: each makes one before it joins."""
        return os.listdir(self._temporary)

    def add(self, count: int) -> None:
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(self._temporary)}
        with self._log.open("a") as log:
            self.agents += [
                Agent(subprocess.Popen(self._command, cwd=self._directory, env=environment, stdout=log, stderr=log))
                for _ in range(count)
            ]

    @property
    def alive(self) -> list[Agent]:
        return [agent for agent in self.agents if not agent.ended]

    @property
    def staying(self) -> list[Agent]:
        return [agent for agent in self.alive if not agent.was_asked]

    def everyone(self) -> list[int]:
        """Return all processes of the job, orphans too."""
        return [pid for pid in processes() if str(self._folder) in command_line(pid)]

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def pause(self) -> bool:
        """Wait a moment. Return whether any agent is left. Raises if the run takes too long."""
        assert time.monotonic() < self._end, f"hangs: {self.log()[-4000:]}"
        time.sleep(PAUSE)
        return bool(self.alive)

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait until something holds. Return False if the job ends before."""
        while not condition():
            if not self.pause():
                return False
        return True

    def saved(self) -> int:
        """Return the newest step that has a checkpoint; 0 if there is none."""
        return max(steps_in(self._folder / "checkpoints"), default=0)

    def stop(self) -> None:
        """Kill all that is left."""
        for pid in self.everyone():
            kill(pid)
        for agent in self.agents:
            agent.process.wait()


def training(folder: Path, stage: int, cadence: Cadence = CADENCE) -> list[str]:
    """Return `zero train` as a worker runs it, with its checkpoints and its record in a folder."""
    flags = [flag for flag in cadence.arguments(folder, 1, stage) if not flag.startswith("--ranks")]
    return ["-m", "zero.train", *flags]


@contextmanager
def elastic_job(folder: Path, module: Sequence[str], directory: Path = ROOT) -> Iterator[ElasticJob]:
    """Return a job without agents; nothing of it is left after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    job = ElasticJob(folder, module, directory)
    try:
        yield job
    finally:
        job.stop()


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def disturb(job: ElasticJob, source: random.Random) -> str:
    """Do something to a job at once. Return what, in words."""
    what = source.choice(["worker", "agent", "both", "leave", "join"])
    alive = job.staying
    agent = source.choice(alive)
    if what == "worker":
        send(agent.workers(), signal.SIGKILL)
        return "a worker is killed"
    if what in ("agent", "both", "leave") and len(alive) > 1:
        if what == "leave":
            agent.leave()
            return "an agent gets SIGTERM"
        send([agent.pid, *(agent.workers() if what == "both" else [])], signal.SIGKILL)
        return "an agent is killed" if what == "agent" else "an agent and its worker are killed"
    count = min(source.randint(1, 2), MOST - len(job.alive))
    job.add(count)
    return f"{count} agents join"


def check_disturbed(seed: int, expected: TrainedRun, folder: Path, cadence: Cadence = CADENCE) -> list[str]:
    """Train with disturbances. Return them, in words. Raises `AssertionError` if the result is another one."""
    source = random.Random(seed)
    agents, stage = source.randint(1, 4), source.randrange(4)
    lines = [f"stage {stage}, {agents} agents"]
    with elastic_job(folder, training(folder, stage, cadence)) as job:
        job.add(agents)
        for _ in range(source.randint(2, 4)):
            before, further = job.saved(), source.choice([None, 0, cadence.every])
            if further is None:  # whatever the ranks do: they may be starting
                end = time.monotonic() + source.uniform(0, BLIND)
                job.until(lambda end=end: time.monotonic() > end)
            else:
                job.until(lambda before=before, further=further: job.saved() >= before + further)
                time.sleep(source.uniform(0, 1.0))
            if not job.staying:
                break
            lines.append(disturb(job, source))
        while job.pause():
            pass
        if lines[1:] and not (folder / "out" / "run.json").exists():  # an agent ended while agents met: see ELASTIC.md
            job.start_anew(1)
            lines.append("all agents have ended, and the job is started again")
            while job.pause():
                pass
        about = f"seed {seed}: {lines}: {job.log()[-6000:]}"
        assert len(lines) > 1, f"nothing has disturbed it: {about}"
        assert (folder / "out" / "run.json").exists(), about
        assert not job.everyone(), f"processes are left: {about}"
    check_outcome(folder, expected, f"seed {seed}: {lines}")
    return lines


def check_outcome(folder: Path, expected: TrainedRun, about: str) -> None:
    """Compare all that a run has left with the undisturbed run. A checkpoint that was saved on a signal may be more."""
    result = outcome(folder)
    assert result.params_sha256 == expected.params_sha256, f"other parameters: {about}"
    assert result.losses == expected.losses, f"other losses: {about}"
    found = verified(folder)
    assert {step: found[step] for step in expected.contents} == expected.contents, f"other checkpoints: {about}"
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {".lock", *(f"step-{step:08d}" for step in found)}, f"left: {left}: {about}"


def main(count: int = 30, first: int = 0) -> None:
    begin, shared = time.monotonic(), set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="zero-elastic-") as folder:
        expected = undisturbed(CADENCE, Path(folder, "undisturbed"))
        print(f"undisturbed: {expected.seconds:.1f} s, SHA-256 {expected.params_sha256}", flush=True)
        for seed in range(first, first + count):
            before = time.monotonic()
            lines = check_disturbed(seed, expected, Path(folder, f"seed-{seed}"))
            assert set(os.listdir("/dev/shm")) == shared, f"seed {seed}: shared memory is left: {lines}"
            print(f"seed {seed}, {time.monotonic() - before:.0f} s: {'; '.join(lines)}", flush=True)
    print(
        f"{count} runs in {time.monotonic() - begin:.0f} s: all have the parameters, the losses and the checkpoints of "
        "the undisturbed run, and left nothing"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
