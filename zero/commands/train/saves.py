"""The checkpoints of `zero train`: when one is saved, its state beside the model, which run may go on from it.

Knows: the flags of checkpoints, and which flags decide the bits of a run. Does not know: how a checkpoint is written.

    state    run        the flags that decide the bits, and the SHA-256 of the text
             losses     F64, the mean loss of every step so far
             scaler     the `GradScaler`

The data of a step is a function of its number, so the number is the position in the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler

from ... import CheckpointError, CheckpointManager, StopOnSignal, ZeroOptimizer, open_checkpoint
from ...checkpoint.folder.directory import steps_in
from ..flags import option_of, to_flags
from ..runner import StoppedError
from .settings import TrainConfig

DECIDING = (
    *("preset", "seed", "micro_batches", "batch", "sequence", "precision", "optimizer", "fused", "clip", "lr"),
    *("weight_decay", "threads", "device"),
)


def check_resume(config: TrainConfig, text_sha256: str) -> None:
    """Raise ValueError if the run cannot begin as ``--resume`` says. Reads files alone."""
    there = {} if config.checkpoint is None else steps_in(config.checkpoint)
    if there and config.resume == "none":
        raise ValueError(
            f"--checkpoint {config.checkpoint} has checkpoints, the newest of step {max(there)}: go on from it with "
            "--resume auto, or name another folder"
        )
    for path in reversed(there.values()):
        try:
            found = open_checkpoint(path)
            step, saved = found.step, found.state.get("run")
        except CheckpointError:
            continue  # the ranks report it, and take the one before
        if not isinstance(saved, dict):
            raise ValueError(f"{path} was not saved by zero train: its state has no 'run'")
        saved = {"device": "cpu", **saved}  # of a run that had no choice
        for name, value in _deciding(config, text_sha256).items():
            if name not in saved or saved[name] != value:
                raise ValueError(
                    f"{option_of(name)} is {value}, but the run that saved {path} had {saved.get(name)}: a run that "
                    "goes on needs the same"
                )
        if config.steps < step:
            raise ValueError(
                f"--steps is {config.steps}, but {path} was saved after step {step}: it must be at least that"
            )
        return


def _deciding(config: TrainConfig, text_sha256: str) -> dict[str, Any]:
    """Return what decides the bits of a run, by the name of the flag."""
    flags = to_flags(config)
    return {**{name: flags[name] for name in DECIDING}, "data": f"text of SHA-256 {text_sha256}"}


@dataclass(frozen=True)
class Saves:
    """The checkpoints of one run on one rank. All ranks make every call."""

    config: TrainConfig
    text_sha256: str
    manager: CheckpointManager
    stop: StopOnSignal

    def resume(self, scaler: GradScaler) -> list[float]:
        """Return the losses of the steps that a checkpoint has, after it was restored; none if there is none."""
        if self.config.resume == "none":
            return []
        found = self.manager.restore(state={"scaler": scaler}, rng=False)  # training draws no random numbers
        return [] if found is None else found.state["losses"].tolist()

    def after_step(self, losses: list[float], scaler: GradScaler) -> None:
        """Save if a checkpoint is due, or if a signal asks some rank to end; then raise `StoppedError`, unless this was
        the last step. A broken checkpoint of the same step is replaced."""
        step, every, last, why = len(losses), self.config.checkpoint_every, self.config.steps, self.stop.why
        if why is not None or step == last or (every is not None and step % every == 0):
            state = {
                "run": _deciding(self.config, self.text_sha256),
                "losses": torch.tensor(losses, dtype=torch.float64),
                "scaler": scaler,
            }
            self.manager.save(step, state, blocking=why is not None, overwrite=self.config.resume == "auto")
        if why is not None and step < last:
            raise StoppedError(f"{why}: all ranks have saved step {step} and end; --resume auto goes on")


@contextmanager
def saving(config: TrainConfig, optimizer: ZeroOptimizer, text_sha256: str) -> Iterator[Saves | None]:
    """Return a context with the checkpoints of a run; None without ``--checkpoint``. Inside it SIGTERM ends no process,
    and at its end the last save has ended. Raises `SaveError` if that one has failed."""
    if config.checkpoint is None:
        yield None
        return
    with StopOnSignal(optimizer) as stop, CheckpointManager(config.checkpoint, optimizer) as manager:
        yield Saves(config, text_sha256, manager, stop)
