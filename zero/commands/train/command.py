"""`zero train`: checks the flags, starts the ranks unless torchrun has started this one, and reports an error.

Knows: which settings fit together. Does not know: what a rank does (`rank`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...checkpoint.directory import LockedDirectory
from ...core.stage import check_reshard, check_sharding_factor, stage_of
from ..elastic import launch_elastic
from ..runner import (
    StoppedError,
    check_output,
    checking_input,
    fail,
    launch_ranks,
    record_error,
    reports_errors,
    under_launcher,
)
from .data import load_corpus
from .model import build_model
from .rank import make_optimizer, optimizer_arguments, work
from .saves import check_resume
from .settings import TrainConfig

__all__ = ["run"]

DEFAULT_RANKS = 2
RANK = "zero.commands.train.rank"
TRACEBACK = "error.txt"


@reports_errors
def run(config: TrainConfig) -> int:
    """Train on ranks that are started here, unless a launcher has started this process. Return the exit code."""
    elastic = config.elastic_ranks
    if elastic is not None:
        config = replace(config, resume="auto")
    with checking_input():
        worlds = [_world_size(config)] if elastic is None else elastic
        _check(config, worlds)
    if elastic is not None and config.checkpoint is not None:
        LockedDirectory(config.checkpoint, "").close()  # raises if another run has it, once instead of in each rank
    try:
        if elastic is not None:
            launch_elastic(RANK, replace(config, elastic=None).to_json(), elastic[0], elastic[-1])
        elif "WORLD_SIZE" in os.environ or worlds[0] == 1:
            work(config)
        else:
            launch_ranks(RANK, config.to_json(), worlds[0], 5 if config.checkpoint is None else 30)
    except StoppedError as stopped:
        return stopped.report()
    except Exception as error:
        record_error(error)
        return fail(error, _save_traceback(error, config.out))
    return 0


def _world_size(config: TrainConfig) -> int:
    """Return the number of ranks: WORLD_SIZE under a launcher, else that of the flag."""
    started = os.environ.get("WORLD_SIZE")
    if started is None:
        return config.ranks or DEFAULT_RANKS
    if config.ranks not in (None, int(started)):
        raise ValueError(
            f"--ranks {config.ranks}, but the launcher started {started} (WORLD_SIZE): omit --ranks, or let them agree"
        )
    return int(started)


def _check(config: TrainConfig, worlds: Sequence[int]) -> None:
    """Raise an error for bad settings before any process is started or any step is taken. ``worlds``: the numbers of
    ranks that there may be."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if config.elastic is not None and "WORLD_SIZE" in os.environ:
        raise ValueError(
            "--elastic starts ranks of its own: omit it under torchrun, whose --nnodes MIN:MAX does the same"
        )
    if restarts and config.resume != "auto":
        raise ValueError(
            f"the launcher restarts ranks that fail (--max-restarts={restarts}), and --resume {config.resume} would "
            "lose their steps each time: use --checkpoint FOLDER --checkpoint-every STEPS --resume auto, or omit "
            "--max-restarts"
        )
    stage = stage_of(config.stage)
    for world in worlds:
        check_sharding_factor(config.sharding_factor, world, stage)
        check_reshard(config.reshard, config.sharding_factor or world, stage)
    optimizer_arguments(config)
    check_resume(config, load_corpus(config.data, config.sequence).sha256)
    if int(os.environ.get("RANK", "0")) == 0:
        check_output(config.out, TRACEBACK)
        if config.checkpoint is not None:
            check_output(config.checkpoint, flag="--checkpoint")
    if "WORLD_SIZE" not in os.environ:
        _dry_run(config)


def _dry_run(config: TrainConfig) -> None:
    """Let the library check its own arguments (stage, optimizer, collective) on a throw-away model."""
    make_optimizer(config, build_model("tiny", 1, seed=0), alone=True).close()


def _save_traceback(error: Exception, out: Path) -> str:
    """Write the traceback, that of the rank that failed if there is one, below `out`. Return words that say so."""
    path = out / TRACEBACK
    trace = getattr(error, "trace", None)
    if trace == "" or under_launcher():
        return ""
    try:
        path.write_text("".join(traceback.format_exception(error)) if trace is None else trace)
    except OSError:
        return ""
    return f" (traceback in {path})"
