"""What all commands share: they start ranks, join a process group, check the output folder, and fail in one line.

Knows: the environment variables of torch's launchers, the beginning and the end of a process group. Does not know:
what the ranks do. Torch is imported when ranks are: an error of the command line does not wait for it.

    zero train --ranks N    -> `launch_ranks`        -> N x `python -m zero.commands.train.command FILE`
    torchrun -m zero.train  -> the agent of torchrun -> N x `python -m zero.train`

`zero.verify` starts its ranks in the first way. The file has the settings, as `zero.job.save` writes them. A rank that
fails writes its error in one line, and the traceback, to the file that its launcher names. Ranks that are started here
have one file together: that of the first to fail. The parent prints its line, once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..runtime.process_group import process_group as joined_group
from ..runtime.process_group import under_launcher

RUN_PREFIX = "zero-"
WRONG_INPUT, STOPPED = 2, 128 + signal.SIGTERM  # exit codes; the second of ranks that have saved on a signal
PATIENCE = 30.0  # seconds in which ranks may end that were asked to
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # of the process group, by the device of the ranks


class RankError(Exception):
    """A launched rank failed. ``line``: its error in one line; ``trace``: its traceback, empty if it wrote none."""

    def __init__(self, rank: int, line: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {line}")
        self.line, self.trace = line, trace


class WrongInputError(Exception):
    """The input of a command is wrong. Its exit code is 2, that of a command line that cannot be read."""


def launch_ranks(module: str, settings: Any, ranks: int) -> None:
    """Run `python -m module` as ``ranks`` processes of this host, and wait for them. They import what this process can
    import, and get its SIGTERM. ``settings``: for `run_rank`, which the module calls.

    Raises `RankError` for the rank that failed first (the others are ended), SystemExit with `STOPPED` if all ranks
    have stopped on a signal.
    """
    import torch.distributed as dist

    from ..job import save

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    shared |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RUN_ID": f"{RUN_PREFIX}{os.getpid()}"}
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="zero-launch-") as folder:
        shared["TORCHELASTIC_ERROR_FILE"] = error = Path(folder, "error")
        save(settings, file := os.path.join(folder, "settings"))
        command = [sys.executable, "-m", module, file, *map(os.path.abspath, sys.path)]
        if in_main := threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, lambda *_: list(map(subprocess.Popen.terminate, started)))
        try:
            for rank in range(ranks):
                variables = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
                started.append(subprocess.Popen(command, env={**os.environ, **variables}))
            while not any(ended := [each.poll() for each in started]) and None in ended:
                time.sleep(0.02)
        finally:
            late = _end(started)
            if in_main:
                signal.signal(signal.SIGTERM, before)
        codes = [-signal.SIGTERM if each in late else each.returncode for each in started]
        if STOPPED in codes and set(codes) <= {STOPPED, -signal.SIGTERM}:
            raise SystemExit(STOPPED)
        written = json.loads(error.read_text())["message"]["extraInfo"] if error.exists() else None
        if any(codes):
            raise _first_failure(codes, written)


def _end(processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Ask processes to end, and wait for them. Kill those that are late, and return them."""
    for each in processes:
        each.terminate()
    end, late = time.monotonic() + PATIENCE, list[subprocess.Popen[bytes]]()
    for each in processes:
        try:
            each.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(each)
            each.kill()
            each.wait()
    return late


def _first_failure(codes: list[int], written: dict[str, Any] | None) -> RankError:
    """Return the error of the rank whose failure is the cause of the others: of one that crashed, or else the one that
    was ``written`` first. The crash may also have come of that one, so its line has both. A process that was ended here
    (SIGTERM) is the last that may be the cause."""
    failed = [rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGTERM)]
    crashed = [rank for rank in failed if codes[rank] < 0]
    if written is not None and (not crashed or written["rank"] in crashed):
        return RankError(written["rank"], written["line"], written["py_callstack"])
    rank = (crashed or failed or [codes.index(-signal.SIGTERM)])[0]
    code = codes[rank]
    how = f"ended with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    memory = ": often a lack of memory" if code == -signal.SIGKILL else ""
    other = "" if written is None else f"; rank {written['rank']}: {written['line']}"
    trace = "" if written is None else written["py_callstack"]
    return RankError(rank, f"the process {how} and left no message{memory}{other}", trace)


def run_rank(work: Callable[[Any], None]) -> int:
    """Call ``work`` with the settings that `launch_ranks` gave to this process. Return the exit code."""
    from ..job import load

    def rank() -> int:
        sys.path[:] = sys.argv[2:]
        work(load(sys.argv[1]))
        return 0

    return exit_code_of(rank)


def exit_code_of(run: Callable[[], int]) -> int:
    """Call ``run``, and return the exit code: what it returned, 1 after an error, 2 if that is a `WrongInputError`, 130
    after an interrupt, or `STOPPED`. The error is for the launcher, and printed in one line unless that is
    `launch_ranks`, which prints it."""
    try:
        return run()
    except KeyboardInterrupt:
        if not under_launcher():  # the launcher reports it
            print("interrupted", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:
        if getattr(error, "code", None) == STOPPED:
            return STOPPED
        record_error(error)
        code = 1 if started_by_us() else fail(error)
        return WRONG_INPUT if isinstance(error, WrongInputError) else code


@contextmanager
def checking_input(*kinds: type[BaseException]) -> Iterator[None]:
    """Make errors of the block, in which a command checks its input, a `WrongInputError`. ``kinds``: by default all."""
    caught = kinds or (Exception, SystemExit)
    try:
        yield
    except caught as error:
        raise WrongInputError(one_line(error)) from error


def fail(error: BaseException | str) -> int:
    """Print an error in one line; under a launcher with the rank. Return the exit code."""
    rank = f"rank {os.environ['RANK']}: " if under_launcher() else ""
    print(f"error: {rank}{one_line(error)}", file=sys.stderr, flush=True)
    return 1


def one_line(error: BaseException | str) -> str:
    """The message of an error without line breaks; its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def check_output(out: Path, *stale: str, flag: str = "--out") -> None:
    """Make the output folder of a command, and delete the stale files there. Raises ValueError if files cannot be
    written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
        for name in stale:
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{flag} {out}: cannot write there ({error.strerror}). Name a folder that can be written"
        ) from None


def record_error(error: BaseException) -> None:
    """Write this rank's error where its launcher, if there is one, looks for it. The first error recorded stays."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    details = {
        "rank": int(os.environ.get("RANK", "0")),
        "line": one_line(error),
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
    }
    own = Path(f"{path}-{os.getpid()}")  # has the name when it is complete: this process may be ended at any moment
    own.write_text(json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}))
    with suppress(FileExistsError):
        os.link(own, path)
    own.unlink()


def started_by_us() -> bool:
    """Whether `launch_ranks` started this process, so that the parent prints its error."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_PREFIX)


@contextmanager
def process_group(device: str, **how: Any) -> Iterator[None]:
    """Enter the default process group of all launched processes, unless ``how``, the arguments of `init_process_group`,
    names others. It is destroyed at the end of the block, also after an error. The process ends with the one that
    launched it. ``device``: "cpu", or "cuda", with which the rank gets its own GPU."""
    import torch

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with joined_group(BACKENDS[device], **how):
        try:
            yield
        except Exception as error:
            record_error(error)
            raise
