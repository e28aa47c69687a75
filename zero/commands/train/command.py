"""`zero train`: checks the flags, starts the ranks unless torchrun has started this one, and reports an error.

Knows: which settings fit together. Does not know: what a rank does (`rank`).
"""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from ...runtime.process_group import under_launcher
from ..flags import to_flags
from ..runner import (
    StoppedError,
    check_output,
    checking_input,
    choose_device,
    counted,
    fail,
    launch_ranks,
    record_error,
    reports_errors,
)
from .data import load_corpus
from .model import build_model
from .optimizers import classes_of, make_optimizer
from .rank import work
from .saves import check_resume
from .settings import DEFAULT_RANKS, TrainConfig

TRACEBACK = "error.txt"


@reports_errors
def run(config: TrainConfig) -> int:
    """Train on ranks that are started here, unless a launcher has started this process. Return the exit code."""
    with checking_input():
        world = _world_size(config)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        device, remark = choose_device(config.device, local, torch.cuda.device_count())
        config = replace(config, device="cuda" if device == "cuda" else "cpu")
        about = _check(config, world)
        if int(os.environ.get("RANK", "0")) == 0:
            print(*([remark] if remark else []), *about, sep="\n", flush=True)
        if "WORLD_SIZE" not in os.environ:  # the library checks the rest on a throw-away model, which takes seconds
            make_optimizer(config, build_model("tiny", 1, seed=0), alone=True).close()
    try:
        if "WORLD_SIZE" in os.environ or world == 1:
            work(config)
        else:
            patience = 5 if config.checkpoint is None else 30
            launch_ranks("zero.commands.train.rank", to_flags(config), world, patience)
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


def _check(config: TrainConfig, world: int) -> list[str]:
    """Raise an error for bad settings before any process is started or any step is taken. Return the lines that say
    what is trained."""
    config.reshard_group_size(world)
    classes_of(config)
    corpus = load_corpus(config.data, config.sequence)
    check_resume(config, corpus.sha256)
    if int(os.environ.get("RANK", "0")) == 0:
        check_output(config.out, TRACEBACK)
        if config.checkpoint is not None:
            check_output(config.checkpoint, flag="--checkpoint")
    numel = sum(parameter.numel() for parameter in build_model(config.preset, 1, seed=0).parameters())
    ranks = counted(world, "GPU rank" if config.device == "cuda" else "CPU rank")
    size = (len(corpus.train) + len(corpus.validation)) / 1e6
    return [
        f"training {config.preset} ({numel:,} parameters) on {ranks}, stage {config.stage}, on {corpus.source} "
        f"({size:.1f} MB of text)",
        f"{counted(config.steps, 'step')} of {config.micro_batches} x {config.batch * config.sequence:,} bytes; losses "
        "are in nats per byte",
    ]


def _save_traceback(error: Exception, out: Path) -> str:
    """Write the traceback, that of the rank that failed if there is one, below ``out``. Return words that say so."""
    trace = getattr(error, "trace", "".join(traceback.format_exception(error)))
    if not trace or under_launcher():
        return ""
    try:
        (out / TRACEBACK).write_text(trace)
    except OSError:
        return ""
    return f" (traceback in {out / TRACEBACK})"
