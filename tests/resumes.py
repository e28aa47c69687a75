"""Runs of `zero train` in which ranks are killed at random moments, and which go on at another number of ranks.

    python -m tests.resumes [COUNT, by default 50] [SEED of the first, by default 0]

Each run saves checkpoints, loses a random rank by SIGKILL, and goes on by ``--resume auto`` at a random number of ranks
and stage, several times until it ends. Its parameters, all losses and the content of every checkpoint must be those of
the undisturbed run, and every checkpoint that a killed run leaves must be whole.

Knows: how a command is started, watched and killed. Does not know: how checkpoints are written.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero import open_checkpoint
from zero.checkpoint.folder.directory import steps_in

ROOT = Path(__file__).resolve().parents[1]
RANK_MODULE = "zero.commands.train.rank"
LIMIT = 240.0  # seconds for one run, on a machine that is busy
PAUSE = 0.01  # seconds between two looks at a process
MOST_KILLS = 4  # of one run


@dataclass(frozen=True)
class Cadence:
    """How long a run is, and how often it saves. ``more``: further flags."""

    steps: int = 40
    micro_batches: int = 12
    every: int = 10
    more: tuple[str, ...] = ()

    def arguments(self, folder: Path, ranks: int, stage: int) -> list[str]:
        """Return the flags of a run with its checkpoints, record and output in a folder."""
        return [
            "--preset=tiny",
            f"--steps={self.steps}",
            f"--micro-batches={self.micro_batches}",
            f"--checkpoint={folder / 'checkpoints'}",
            f"--checkpoint-every={self.every}",
            "--resume=auto",
            f"--ranks={ranks}",
            f"--stage={stage}",
            f"--out={folder / 'out'}",
            *self.more,
        ]

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks that this run may have."""
        return list(range(1, 7))


@dataclass(frozen=True)
class TrainedRun:
    """What a run that has ended leaves. ``contents``: of each checkpoint, by step; ``seconds``: until the last one."""

    params_sha256: str
    losses: tuple[float, ...]
    contents: dict[int, str]
    seconds: float = field(default=0.0, compare=False)


class TrainCommand:
    """One `zero train` in processes of its own."""

    def __init__(self, cadence: Cadence, folder: Path, ranks: int, stage: int) -> None:
        """``folder``: of the checkpoints, the record and the output."""
        self.about = f"{ranks} ranks, stage {stage}"
        self._ranks, self._folder = ranks, folder
        self._lock, self._log = folder / "checkpoints" / ".lock", folder / "log"
        self._before = self._holder()
        arguments = cadence.arguments(folder, ranks, stage)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "zero.commands.cli", "train", *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._end = time.monotonic() + LIMIT

    def ranks(self) -> list[int]:
        """Return the processes that train: children of the command, or the command itself if it has one rank."""
        if self._ranks == 1:
            return [] if self.ended else [self._process.pid]
        return [pid for pid in processes(self._process.pid) if RANK_MODULE in command_line(pid)]

    def orphans(self) -> list[int]:
        """Return the processes of this folder's runs, whatever their parent."""
        return [pid for pid in processes() if str(self._folder) in command_line(pid)]

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def holds_lock(self) -> bool:
        """Return whether the run has taken the lock of the folder: training begins."""
        return self._holder() not in (None, self._before)

    def is_saving(self) -> bool:
        """Return whether a save is under way."""
        return self.holds_lock() and any(self._lock.parent.glob(".tmp-*"))

    def _holder(self) -> str | None:
        try:
            return str(json.loads(self._lock.read_text())["nonce"])
        except (OSError, ValueError, KeyError):
            return None

    def pause(self) -> bool:
        """Wait a moment. Return whether the run is still under way. Raises if it is for too long."""
        assert time.monotonic() < self._end, f"{self.about}: hangs: {self.output()}"
        time.sleep(PAUSE)
        return not self.ended

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        while self.pause():
            pass
        return self._process.returncode

    def output(self) -> str:
        return self._log.read_text()[-2000:]

    def stop(self) -> None:
        """Kill all that is left."""
        for pid in [*self.ranks(), self._process.pid]:
            if not self.ended:
                kill(pid)
        self._process.wait(LIMIT)


def processes(parent: int | None = None) -> Iterator[int]:
    """Yield all processes, or those that one has started."""
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


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def started(cadence: Cadence, folder: Path, ranks: int, stage: int) -> Iterator[TrainCommand]:
    """Start a run; nothing of it is left after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    command = TrainCommand(cadence, folder, ranks, stage)
    try:
        yield command
    finally:
        command.stop()


def undisturbed(cadence: Cadence, folder: Path) -> TrainedRun:
    """Train without a kill."""
    with started(cadence, folder, ranks=2, stage=2) as command:
        while not command.holds_lock() and command.pause():
            pass
        begin = time.monotonic()
        while cadence.steps not in steps_in(folder / "checkpoints") and command.pause():
            pass
        seconds = time.monotonic() - begin
        assert command.wait() == 0, command.output()
        return replace(outcome(folder), seconds=seconds)


def outcome(folder: Path) -> TrainedRun:
    record: dict[str, Any] = json.loads((folder / "out" / "run.json").read_text())
    return TrainedRun(record["params_sha256"], tuple(record["losses"]), verified(folder))


def verified(folder: Path) -> dict[int, str]:
    """Return the content of each checkpoint. Raises `CheckpointError` if one is not whole."""
    found = {}
    for step, path in steps_in(folder / "checkpoints").items():
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        found[step] = checkpoint.content
    return found


def check_disturbed(seed: int, cadence: Cadence, expected: TrainedRun, folder: Path) -> list[str]:
    """Train with kills. Return a line for each process group. Raises `AssertionError` if the result is another one."""
    source = random.Random(seed)
    lines: list[str] = []
    for left in reversed(range(source.randint(1, MOST_KILLS) + 1)):
        ranks, stage = source.choice(cadence.ranks), source.randrange(4)
        with started(cadence, folder, ranks, stage) as command:
            killed = bool(left) and _kill_one(command, source, expected.seconds)
            code = command.wait()
            assert killed or code == 0, f"seed {seed}, {command.about}: {command.output()}"
            assert not command.orphans(), f"seed {seed}, {command.about}: ranks are left"
        found = verified(folder)
        for step, content in found.items():
            assert content == expected.contents[step], f"seed {seed}, {command.about}: step {step} has another content"
        under_way = any(path.name.startswith(".tmp-") for path in (folder / "checkpoints").glob(".*"))
        what = "" if not killed else ", killed" + (" during a save" if under_way else "")
        lines.append(f"{command.about}{what}, steps saved: {', '.join(map(str, found)) or 'none'}")
        if code == 0:
            break
    result = outcome(folder)
    assert result.params_sha256 == expected.params_sha256, f"seed {seed}: other parameters: {lines}"
    assert result.losses == expected.losses, f"seed {seed}: other losses: {lines}"
    assert result.contents == expected.contents, f"seed {seed}: other checkpoints: {lines}"
    left_behind = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left_behind == {".lock", *(f"step-{step:08d}" for step in found)}, f"seed {seed}: left: {left_behind}"
    return lines


def _kill_one(command: TrainCommand, source: random.Random, seconds: float) -> bool:
    """Kill a rank at a random moment: of its start, of a save, or of training. Return whether the run was under way.

    ``seconds``: how long training takes.
    """
    begun: Callable[[], object]
    begun, longest = source.choices(
        [(command.ranks, 1.2 * seconds), (command.is_saving, 0.1), (command.holds_lock, 1.2 * seconds)], [1, 2, 2]
    )[0]
    delay = source.uniform(0, longest)
    while not begun() and command.pause():
        pass
    end = time.monotonic() + delay
    while time.monotonic() < end and command.pause():
        pass
    found = command.ranks()
    if not found:
        return False
    kill(source.choice(found))
    return True


def main(count: int = 50, first: int = 0) -> None:
    begin, cadence, kills, during = time.monotonic(), Cadence(), 0, 0
    with tempfile.TemporaryDirectory(prefix="zero-resumes-") as folder:
        expected = undisturbed(cadence, Path(folder, "undisturbed"))
        print(f"undisturbed: {expected.seconds:.1f} s, SHA-256 {expected.params_sha256}", flush=True)
        for seed in range(first, first + count):
            lines = check_disturbed(seed, cadence, expected, Path(folder, f"seed-{seed}"))
            kills += sum(", killed" in line for line in lines)
            during += sum("during a save" in line for line in lines)
            print(f"seed {seed}: {'; '.join(lines)}", flush=True)
    print(
        f"{count} runs with {kills} kills, {during} of them during a save, in {time.monotonic() - begin:.0f} s: all "
        "have the parameters, the losses and the checkpoints of the undisturbed run"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
