"""Processes: starting ranks, joining their group, and carrying one rank's error to the person at the terminal.

Knows: torch's elastic launcher, its environment variables, the process group's beginning and end. Does not know:
what the ranks do. Two ways lead here, and a rank cannot tell them apart but by `started_by_us`:

    zero train --ranks N    -> this file's `launch_ranks` -> N x `python -m zero.train`
    torchrun -m zero.train  -> torchrun's own agent       -> N x `python -m zero.train`

`zero.verify` and `zero sweep` go the first way.

An error travels as elastic's error file: the rank that fails writes one line and the traceback into it, the
parent prints the line of the rank that failed first, once.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["RankError", "World", "barrier", "launch_ranks", "process_group", "record_error", "started_by_us"]

RUN_PREFIX = "zero-"


class RankError(Exception):
    """A rank that was launched ended badly: its error in one `line`, and in `trace` its traceback, if it left one."""

    def __init__(self, rank: int, line: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {line}")
        self.line, self.trace = line, trace


def launch_ranks(module: str, arguments: Sequence[str], ranks: int) -> None:
    """Run `python -m module arguments` as `ranks` processes of this host and wait for them.

    Raises RankError for the rank that failed first (the others are stopped), KeyboardInterrupt when interrupted.
    """
    _silence_agent()
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
            shutdown_timeout=5,
            logs_specs=DefaultLogsSpecs(log_dir=errors),
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            raise _first_failure(error.failures) from None
        except SignalException:
            raise KeyboardInterrupt from None


def _silence_agent() -> None:
    """The agent logs a page about each rank that ends; what matters of it is in RankError."""
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
    """Sorts failures by what caused what. A crash leaves no time, but the others fail because of it; then come recorded
    errors by their time; a process that the agent itself ended (SIGTERM) is never the cause."""
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        return -math.inf
    return float(_details(failure).get("time", math.inf))


def _details(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data["message"]
    return message["extraInfo"] if isinstance(message, dict) else {}


def record_error(error: BaseException) -> None:
    """Leave this rank's error where the launcher looks for it. The first error recorded stays."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name or path.exists():
        return
    now = time.time()
    details = {
        "line": " ".join(str(error).split()) or type(error).__name__,
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(now)),
        "time": now,
    }
    path.write_text(json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}))


def started_by_us() -> bool:
    """Whether `launch_ranks` started this process, and so will show its error."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_PREFIX)


@dataclass(frozen=True)
class World:
    """The first ``size`` of the processes that were launched, which meet through the file ``meeting``."""

    size: int
    meeting: Path
    timeout: float


@contextmanager
def process_group(world: World | None = None) -> Iterator[None]:
    """The default process group over gloo, of all that the launcher started or of ``world``; closed on the way out,
    come what may."""
    if world is None:
        dist.init_process_group("gloo")
    else:
        store = dist.FileStore(str(world.meeting), world.size)  # type: ignore[attr-defined]
        limit = timedelta(seconds=world.timeout)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world.size, timeout=limit)
    try:
        yield
    except Exception as error:
        record_error(error)
        raise
    finally:
        dist.destroy_process_group()


def barrier() -> None:
    """Wait until every rank of the default process group is here. All ranks."""
    dist.barrier()
