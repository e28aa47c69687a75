"""Runs of `zero train` under torchrun whose ranks die, leave and come at random moments, and that go on elsewhere.

    python -m tests.resumes [COUNT, by default 50] [SEED of the first, by default 0]

At random moments a worker, an agent or both are killed, an agent gets SIGTERM, agents are added, or all processes are
killed and others go on, at another stage and number of ranks. A moment is any of the run, or one inside a save.
Parameters, all losses and the content of each checkpoint must be those of the undisturbed run; no process and no file
may be left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from .support.torchrun import (
    MOST,
    Cadence,
    TorchrunJob,
    TrainedRun,
    check_outcome,
    send,
    torchrun_job,
    training,
    undisturbed,
)

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
