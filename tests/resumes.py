"""Runs of `zero train` under torchrun whose ranks die, leave and come at random moments, and that go on elsewhere.

    python -m tests.resumes [COUNT, by default 50] [SEED of the first, by default 0]

At random moments a worker, an agent or both are killed, an agent gets SIGTERM, agents are added, or all processes are
killed and others go on, at another stage and number of ranks. A moment is any of the run, or one inside a save.
Parameters, all losses and the content of each checkpoint must be those of the undisturbed run; no process and no file
may be left.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from zero import open_checkpoint
from zero.checkpoint.folder.directory import steps_in

ROOT = Path(__file__).resolve().parents[1]
RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"  # as in ELASTIC.md
MOST = 5  # agents at a time
LIMIT = 600.0  # seconds for one run, on a machine that is busy; agents may wait for each other for 300 at the end
PAUSE = 0.05  # seconds between two looks
STOPPED = re.compile(r"stopped: rank (\d+) got SIGTERM: all ranks have saved step (\d+) and end")
BEGUN = re.compile(r"on (\d+) cpu rank\(s\): step ([1-9]\d*) of")


@dataclass(frozen=True)
class Cadence:
    """How long a run is, and how often it saves. ``more``: further flags."""

    steps: int = 60
    micro_batches: int = 7
    every: int = 10
    more: tuple[str, ...] = ("--batch=4",)

    def flags(self, folder: Path, stage: int) -> list[str]:
        sizes = {"steps": self.steps, "micro-batches": self.micro_batches, "save-every": self.every, "stage": stage}
        folders = {"checkpoint": folder / "checkpoints", "out": folder / "out"}
        flags = (f"--{name}={value}" for name, value in {**sizes, **folders}.items())
        return ["--width=64", "--layers=2", *flags, *self.more]


@dataclass(frozen=True)
class TrainedRun:
    """What a run that has ended leaves. ``contents``: of each checkpoint, by step."""

    params_sha256: str
    losses: dict[str, float]
    contents: dict[int, str]


def outcome(folder: Path) -> TrainedRun:
    record: dict[str, Any] = json.loads((folder / "out" / "run.json").read_text())
    return TrainedRun(record["params_sha256"], record["losses"], verified(folder))


def verified(folder: Path) -> dict[int, str]:
    found = {}
    for step, path in steps_in(folder / "checkpoints").items():
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        found[step] = checkpoint.content
    return found


def check_outcome(folder: Path, expected: TrainedRun, about: str) -> None:
    """Compare all that a run has left with the undisturbed run. A checkpoint that was saved on a signal may be more."""
    result = outcome(folder)
    assert result.params_sha256 == expected.params_sha256, f"other parameters: {about}"
    assert result.losses.items() <= expected.losses.items(), f"other losses: {about}"
    common = {step: result.contents.get(step) for step in expected.contents}
    assert common == expected.contents, f"other checkpoints: {about}"
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {".lock", *(f"step-{step:08d}" for step in result.contents)}, f"left: {left}: {about}"


class Agent(subprocess.Popen[bytes]):
    """An agent of torchrun, which keeps one worker alive."""

    was_asked = False

    @property
    def ended(self) -> bool:
        return self.poll() is not None

    def workers(self) -> list[int]:
        return list(processes(self.pid))

    def leave(self) -> None:
        """Send SIGTERM; the agent passes it on to its worker, and waits for it."""
        self.was_asked = True
        self.terminate()


class TorchrunJob:
    """A job under torchrun on this host: a store, and agents that may be added at any time."""

    def __init__(self, folder: Path, module: Sequence[str], directory: Path = ROOT) -> None:
        """``folder``: of the log and the checkpoints. ``module``: what a worker runs, in a directory."""
        self.agents: list[Agent] = []
        self._module, self._id = module, uuid.uuid4()
        self._folder, self._log, self._directory = folder, folder / "log", directory
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._end = time.monotonic() + LIMIT
        self._temporary = folder / "temporary"
        self._temporary.mkdir(exist_ok=True)

    def start_anew(self, count: int, module: Sequence[str]) -> None:
        """Start the job again after all agents have ended: they closed the meeting of their ``--rdzv-id``."""
        self._id, self._module = uuid.uuid4(), module
        self.add(count)

    def add(self, count: int) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{MOST}", "--nproc-per-node=1"),
            *("--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._store.port}"),
            *(f"--rdzv-id={self._id}", f"--rdzv-conf={RENDEZVOUS}", "--local-addr=localhost"),
            *self._module,
        ]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(self._temporary)}
        with self._log.open("a") as log:
            for _ in range(count):
                self.agents.append(Agent(command, cwd=self._directory, env=environment, stdout=log, stderr=log))

    @property
    def alive(self) -> list[Agent]:
        return [agent for agent in self.agents if not agent.ended]

    @property
    def staying(self) -> list[Agent]:
        return [agent for agent in self.alive if not agent.was_asked]

    def folders(self) -> list[str]:
        """Return the folders of all agents: each makes one before it joins."""
        return os.listdir(self._temporary)

    def processes(self) -> list[int]:
        return [pid for pid in processes() if str(self._folder) in command_line(pid)]

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def pause(self) -> bool:
        """Wait a moment. Return whether any agent is left. Raises if the run takes too long."""
        assert time.monotonic() < self._end, f"hangs: {self.log()[-4000:]}"
        time.sleep(PAUSE)
        return bool(self.alive)

    def until(self, condition: Callable[[], object]) -> bool:
        while not condition():
            if not self.pause():
                return False
        return True

    def wait(self) -> None:
        while self.pause():
            pass

    def saved(self) -> int:
        """Return the newest step that has a checkpoint; 0 if there is none."""
        return max(steps_in(self._folder / "checkpoints"), default=0)

    def is_saving(self) -> bool:
        return any((self._folder / "checkpoints").glob(".tmp-*"))

    def stop(self) -> None:
        send(self.processes(), signal.SIGKILL)
        for agent in self.agents:
            agent.wait()


def training(folder: Path, stage: int, cadence: Cadence) -> list[str]:
    return ["-m", "zero.train", *cadence.flags(folder, stage)]


@contextmanager
def torchrun_job(folder: Path, module: Sequence[str], directory: Path = ROOT) -> Iterator[TorchrunJob]:
    """Return a job without agents; nothing of it is left after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    job = TorchrunJob(folder, module, directory)
    try:
        yield job
    finally:
        job.stop()


def undisturbed(cadence: Cadence, folder: Path) -> TrainedRun:
    command = [sys.executable, "-m", "zero.commands.cli", "train", "--ranks=2", *cadence.flags(folder, stage=2)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return outcome(folder)


def processes(parent: int | None = None) -> Iterator[int]:
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if parent is None or int(fields[1]) == parent:
            yield int(place.name)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


BLIND = 15.0  # seconds, about what ranks need to start


def check_disturbed(seed: int, expected: TrainedRun, folder: Path, cadence: Cadence) -> list[str]:
    """Train with disturbances. Return them, in words. Raises `AssertionError` if the result is another one."""
    source = random.Random(seed)
    agents, stage = source.randint(1, 4), source.randrange(4)
    lines = [f"stage {stage}, {agents} agents"]
    with torchrun_job(folder, training(folder, stage, cadence)) as job:
        job.add(agents)
        for _ in range(source.randint(2, 4)):
            if not _wait_for_a_moment(job, source, cadence):
                break
            lines.append(_disturb(job, source))
            if not job.alive:
                lines.append(_start_anew(job, source, folder, cadence))
        job.wait()
        if not (folder / "out" / "run.json").exists():  # an agent ended while agents met: see ELASTIC.md
            lines.append(_start_anew(job, source, folder, cadence))
            job.wait()
        about = f"seed {seed}: {lines}: {job.log()[-6000:]}"
        assert len(lines) > 1, f"nothing has disturbed it: {about}"
        assert (folder / "out" / "run.json").exists(), about
        assert not job.processes(), f"processes are left: {about}"
    check_outcome(folder, expected, f"seed {seed}: {lines}")
    return lines


def _wait_for_a_moment(job: TorchrunJob, source: random.Random, cadence: Cadence) -> bool:
    """Wait for a random moment of the run. Return whether an agent still trains then."""
    kind, before = source.choice(["any", "saved", "saving"]), job.saved()
    if kind == "any":  # whatever the ranks do: they may be starting
        end = time.monotonic() + source.uniform(0, BLIND)
        job.until(lambda: time.monotonic() > end)
    elif kind == "saved":
        further = before + source.choice([0, cadence.every])
        job.until(lambda: job.saved() >= further)
        time.sleep(source.uniform(0, 1.0))
    else:
        job.until(job.is_saving)
    return bool(job.staying)


def _disturb(job: TorchrunJob, source: random.Random) -> str:
    what = source.choice(["worker", "agent", "both", "leave", "join", "all"])
    during = " during a save" if job.is_saving() else ""
    agent = source.choice(job.staying)
    if what == "worker":
        send(agent.workers(), signal.SIGKILL)
        return f"a worker is killed{during}"
    if what == "all":
        job.stop()
        return f"all are killed{during}"
    if what != "join" and len(job.staying) > 1:
        if what == "leave":
            agent.leave()
            return f"an agent gets SIGTERM{during}"
        send([agent.pid, *(agent.workers() if what == "both" else [])], signal.SIGKILL)
        return f"an agent {'is' if what == 'agent' else 'and its worker are'} killed{during}"
    count = min(source.randint(1, 2), MOST - len(job.alive))
    job.add(count)
    return f"{count} agents join{during}"


def _start_anew(job: TorchrunJob, source: random.Random, folder: Path, cadence: Cadence) -> str:
    count, stage = source.randint(1, MOST), source.randrange(4)
    job.start_anew(count, training(folder, stage, cadence))
    return f"{count} agents start anew, stage {stage}"


def main(count: int = 50, first: int = 0) -> None:
    begin, shared, cadence = time.monotonic(), set(os.listdir("/dev/shm")), Cadence()
    with tempfile.TemporaryDirectory(prefix="zero-resumes-") as folder:
        expected = undisturbed(cadence, Path(folder, "undisturbed"))
        for seed in range(first, first + count):
            before = time.monotonic()
            lines = check_disturbed(seed, expected, Path(folder, f"seed-{seed}"), cadence)
            assert set(os.listdir("/dev/shm")) == shared, f"seed {seed}: shared memory is left: {lines}"
            print(f"seed {seed}, {time.monotonic() - before:.0f} s: {'; '.join(lines)}", flush=True)
    print(
        f"{count} runs in {time.monotonic() - begin:.0f} s: all have the parameters, the losses and the checkpoints of "
        "the undisturbed run, and left nothing"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
