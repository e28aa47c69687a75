"""What all commands share: they start ranks, join a process group, check the output folder, and fail in one line.

Knows: torch's elastic launcher, its environment variables, the beginning and the end of a process group. Does not
know: what the ranks do. Torch is imported when ranks are: an error of the command line does not wait for it.

    zero train --ranks N    -> `launch_ranks`        -> N x `python -m zero.commands.train.rank SETTINGS`
    torchrun -m zero.train  -> the agent of torchrun -> N x `python -m zero.train`

`zero.verify` starts its ranks in the first way. The settings are one argument, in JSON.

An error travels in elastic's error file: the rank that fails writes one line and the traceback to it, and the
parent prints the line of the rank that failed first, once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from ..runtime.process_group import process_group as joined_group
from ..runtime.process_group import under_launcher

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RUN_PREFIX = "zero-"
WRONG_INPUT = 2
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # of the process group, by the device of the ranks
P = ParamSpec("P")


class RankError(Exception):
    """A launched rank failed. ``line``: its error in one line; ``trace``: its traceback, empty if it wrote none."""

    def __init__(self, rank: int, line: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {line}")
        self.line, self.trace = line, trace


class WrongInputError(Exception):
    """The input of a command is wrong. Its exit code is 2, that of a command line that cannot be read."""


class StoppedError(Exception):
    """A signal has ended a run that goes on where it was left. Says where that is."""

    EXIT_CODE = 128 + signal.SIGTERM  # as shells have it

    def report(self) -> int:
        """Print it, once for all ranks. Return the exit code."""
        if os.environ.get("RANK", "0") == "0":
            print(f"stopped: {self}", file=sys.stderr, flush=True)
        return self.EXIT_CODE


def launch_ranks(module: str, settings: Mapping[str, Any], ranks: int, patience: int = 5) -> None:
    """Run `python -m module SETTINGS` as ``ranks`` processes of this host, and wait for them. ``patience``: seconds in
    which ranks may end that were asked to.

    Raises RankError for the rank that failed first (the others are stopped), StoppedError if all ranks raised that,
    KeyboardInterrupt when interrupted.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_agent()
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    patient: dict[str, Any] = {"shutdown_timeout": patience} if "shutdown_timeout" in known else {}  # not in torch 2.11
    with tempfile.TemporaryDirectory(prefix="zero-launch-") as errors:  # elastic's own folder would stay
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"{RUN_PREFIX}{uuid.uuid4()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=errors),
            **patient,
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, json.dumps(settings, default=str))
        except ChildFailedError as error:
            first = _first_failure(error.failures)
            ends = {failure.exitcode for failure in error.failures.values()}
            stopped = StoppedError.EXIT_CODE in ends and ends <= {StoppedError.EXIT_CODE, -signal.SIGTERM}
            raise (StoppedError(first.line) if stopped else first) from None
        except SignalException:
            raise KeyboardInterrupt from None


def _silence_agent() -> None:
    """Switch off the agent's log: it has a page for each failed rank, of which RankError holds the facts."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


def _first_failure(failures: dict[int, ProcessFailure]) -> RankError:
    rank = min(failures, key=lambda rank: (_when(failures[rank]), rank))
    failure = failures[rank]
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"
    memory = ": often a lack of memory" if failure.exitcode == -signal.SIGKILL else ""
    details = _details(failure)
    return RankError(
        rank,
        details.get("line", f"the process {how} and left no message{memory}"),
        details.get("py_callstack", ""),
    )


def _when(failure: ProcessFailure) -> float:
    """Return a sort key: causes come before consequences. A crash comes first: it has no recorded time, and the other
    ranks fail because of it. Recorded errors follow by their time. A process that the agent ended (SIGTERM) is last."""
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        return -math.inf
    return float(_details(failure).get("time", math.inf))


def _details(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data["message"]
    return message["extraInfo"] if isinstance(message, dict) else {}


def run_rank(work: Callable[[dict[str, Any]], None]) -> int:
    """Call ``work`` with the settings that `launch_ranks` gave to this process. Return the exit code. The launcher gets
    the error, if there is one."""
    try:
        work(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        return 130
    except StoppedError as stopped:
        record_error(stopped)
        return stopped.EXIT_CODE if started_by_us() else stopped.report()
    except (Exception, SystemExit) as error:
        record_error(error)
        return 1 if started_by_us() else fail(error)
    return 0


def reports_errors(run: Callable[P, int]) -> Callable[P, int]:
    """Make a command of ``run`` that never raises and returns the exit code: that of ``run``, 1 after an error, which
    it prints in one line, 2 if that is a `WrongInputError`, or 130 after an interrupt."""

    @functools.wraps(run)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return run(*args, **kwargs)
        except KeyboardInterrupt:
            if not under_launcher():  # the launcher reports it
                print("interrupted", file=sys.stderr)
            return 130
        except Exception as error:
            record_error(error)
            code = fail(error)
            return WRONG_INPUT if isinstance(error, WrongInputError) else code

    return command


@contextmanager
def checking_input(*kinds: type[Exception]) -> Iterator[None]:
    """Make errors of the block, in which a command checks its input, a `WrongInputError`. ``kinds``: by default all."""
    caught = kinds or (Exception,)
    try:
        yield
    except caught as error:
        raise WrongInputError(one_line(error)) from error


def fail(error: BaseException | str, note: str = "") -> int:
    """Print an error in one line, and a note behind it; under a launcher with the rank. Return the exit code."""
    rank = f"rank {os.environ['RANK']}: " if under_launcher() else ""
    print(f"error: {rank}{one_line(error)}{note}", file=sys.stderr, flush=True)
    return 1


def one_line(error: BaseException | str) -> str:
    """The message of an error without line breaks; its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def choose_device(asked: str | None, local_ranks: int, gpus: int) -> tuple[str, str | None]:
    """Return the device on which the ranks of a host compute, "cpu" or "cuda", and a line to print: why GPUs of the
    host are not used; None if there is nothing to say.

    ``asked``: the value of --device, None if it is omitted: then the GPUs are taken if each rank gets its own.
    ``local_ranks`` and ``gpus``: how many the host has. Raises ValueError if "cuda" is asked for and they are too few.
    """
    if asked not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', not {asked!r}")
    if asked == "cuda" and gpus == 0:
        raise ValueError(
            "--device cuda: this torch finds no GPU. Install a build of torch with CUDA, on a host that has one, or "
            "take --device cpu"
        )
    if asked == "cuda" and gpus < local_ranks:
        raise ValueError(
            f"--device cuda needs one GPU per rank, and this host has {counted(gpus, 'GPU')} for "
            f"{counted(local_ranks, 'rank')}: start fewer ranks, or take the CPU"
        )
    if asked is not None:
        return asked, None
    if gpus >= local_ranks:
        return "cuda", None
    if gpus == 0:
        return "cpu", None
    return "cpu", (
        f"this host has {counted(gpus, 'GPU')} for {counted(local_ranks, 'rank')}, so they compute on the CPU, over "
        f"gloo; with at most {counted(gpus, 'rank')} each would have its own GPU"
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_output(out: Path, *stale: str, flag: str = "--out") -> None:
    """Make the output folder of a command, and delete the stale files there. Raises ValueError if files cannot be
    written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            for name in stale:
                (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{flag} {out}: cannot write there ({error.strerror}). Name a folder that can be written"
        ) from None


def check_alone(command: str) -> None:
    """Refuse to run a command that starts its own ranks on several ranks that a launcher started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(f"{command} starts its own ranks: call it in one process, without torchrun")


def record_error(error: BaseException) -> None:
    """Write this rank's error where its launcher, if there is one, looks for it. The first error recorded stays."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name or path.exists():
        return
    now = time.time()
    details = {
        "line": one_line(error),
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(now)),
        "time": now,
    }
    path.write_text(json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}))


def started_by_us() -> bool:
    """Whether `launch_ranks` started this process, so that the parent prints its error."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_PREFIX)


@contextmanager
def process_group(meeting: Path | None = None, device: str = "cpu", **how: Any) -> Iterator[None]:
    """Enter the default process group of all launched processes, or of the first ``world_size`` of them, which meet
    through a file. It is destroyed at the end of the block, also after an error. The process ends with the one that
    launched it. ``device``: of `choose_device`; with "cuda" the rank gets its own GPU. ``how``: of
    `init_process_group`."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if meeting is not None:
        how["store"] = dist.FileStore(str(meeting), how["world_size"])  # type: ignore[attr-defined]
        how["rank"] = int(os.environ["RANK"])
    with joined_group(BACKENDS[device], **how):
        try:
            yield
        except Exception as error:
            record_error(error)
            raise
