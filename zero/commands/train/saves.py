"""The checkpoints of `zero train`: when one is saved, its state beside the model, which run may go on from it.

Knows: the flags of checkpoints, and which flags decide the bits of a run. Does not know: how a checkpoint is written.

    state    run        the flags that decide the bits, and the SHA-256 of the text
             losses     F64, the mean loss of every step so far
             scaler     the `GradScaler`

The data of a step is a function of its number, so the number is the position in the data.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.amp import GradScaler

from ... import CheckpointError, CheckpointManager, ZeroOptimizer, load, open_checkpoint
from ...checkpoint.folder.directory import steps_in
from ...checkpoint.read.restorer import Restored
from ...checkpoint.stop_request import StopOnSignal
from ...checkpoint.write.save_folder import SaveError
from ...checkpoint.write.save_thread import Saving
from .settings import TrainConfig, option_of

__all__ = ["SaveRecord", "Saves", "check_resume"]

DECIDING = (
    *("preset", "seed", "micro_batches", "batch", "sequence", "precision", "optimizer", "fused", "clip", "lr"),
    *("weight_decay", "threads"),
)


def check_resume(config: TrainConfig, text_sha256: str) -> None:
    """Raise an error if the run cannot begin as ``--resume`` says. Reads files alone."""
    there = {} if config.checkpoint is None else steps_in(config.checkpoint)
    newest = max(there, default=-1)
    if config.resume == "none":
        if there:
            raise ValueError(
                f"--checkpoint {config.checkpoint} has checkpoints, the newest of step {newest}: go on from it with "
                "--resume auto, or name another folder"
            )
    elif config.resume == "auto":
        for path in reversed(there.values()):
            try:
                saved = open_checkpoint(path)
                step, state = saved.step, saved.state
            except CheckpointError:
                continue  # the ranks report it, and take the one before
            _check_same_run(config, text_sha256, path, step, state)
            return
    else:
        try:
            saved = open_checkpoint(config.resume)
            step, state = saved.step, saved.state
        except CheckpointError as error:
            raise ValueError(f"--resume {config.resume}: {error}") from error
        _check_same_run(config, text_sha256, saved.path, step, state)
        if newest > step:
            raise ValueError(
                f"--checkpoint {config.checkpoint} has a checkpoint of step {newest}, and --resume {config.resume} "
                f"goes on from step {step}: name another folder"
            )


def _check_same_run(config: TrainConfig, text_sha256: str, path: Path, step: int, state: Mapping[str, Any]) -> None:
    """Raise an error naming the first flag that would make this run another one than that of a checkpoint."""
    saved = state.get("run")
    if not isinstance(saved, dict):
        raise ValueError(f"{path} was not saved by zero train: its state has no 'run'")
    for name, value in _deciding(config, text_sha256).items():
        if name not in saved or saved[name] != value:
            raise ValueError(
                f"{option_of(name)} is {value}, but the run that saved {path} had {saved.get(name)}: a run that goes "
                "on needs the same"
            )
    if config.steps < step:
        raise ValueError(f"--steps is {config.steps}, but {path} was saved after step {step}: it must be at least that")


def _deciding(config: TrainConfig, text_sha256: str) -> dict[str, Any]:
    """Return what decides the bits of a run, by the name of the flag."""
    values = config.to_json()
    return {**{name: values[name] for name in DECIDING}, "data": f"text of SHA-256 {text_sha256}"}


@dataclass(frozen=True)
class SaveRecord:
    """One save, as rank 0 has seen it. ``bytes``: of the whole checkpoint; ``gb_per_second``: of all ranks together,
    None if the save has failed; ``blocked_ms``: for how long training has waited."""

    step: int
    bytes: int
    gb_per_second: float | None
    blocked_ms: float


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: after so many steps, with their losses. ``lines``: what the user should know."""

    step: int
    losses: list[float]
    lines: list[str]


class Saves:
    """The saves of one run on one rank. All ranks make every call. Without ``--checkpoint`` nothing is saved.

    A ``with`` block ends when the last save has ended. ``unsaved`` says then why that one has failed, if it has. Until
    then SIGTERM does not end the process.
    """

    def __init__(self, config: TrainConfig, optimizer: ZeroOptimizer, text_sha256: str) -> None:
        """Open the folder."""
        self._config, self._optimizer, self._text_sha256 = config, optimizer, text_sha256
        self._savings: list[Saving] = []
        self.unsaved: str | None = None
        self._manager: CheckpointManager | None = None
        self._stop = StopOnSignal(optimizer)
        if config.checkpoint is not None:
            self._manager = CheckpointManager(
                config.checkpoint, optimizer, max_to_keep=config.keep, asynchronous=not config.no_async
            )

    def __enter__(self) -> Saves:
        if self._manager is not None:
            self._stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is None:
            return
        try:
            self._manager.__exit__(kind, error, trace)
        except SaveError as problem:
            self.unsaved = str(problem)
        finally:
            self._stop.__exit__(kind, error, trace)

    def resume(self, scaler: GradScaler) -> Resumed:
        """Restore the checkpoint that ``--resume`` names, if there is one."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = self._restore(scaler)
        lines = [f"{warning.message}" for warning in told]
        if found is None:
            return Resumed(0, [], lines)
        _check_same_run(self._config, self._text_sha256, found.path, found.step, found.state)
        return Resumed(found.step, found.state["losses"].tolist(), lines)

    def _restore(self, scaler: GradScaler) -> Restored | None:
        resume, state = self._config.resume, {"scaler": scaler}
        if resume == "auto" and self._manager is not None:
            return self._manager.restore(state=state)
        return None if resume == "none" else load(resume, self._optimizer, state)

    @property
    def stop_requested(self) -> str | None:
        """Which rank was asked by a signal to end, as text; equal on all ranks after a step."""
        return self._stop.why

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is saved after so many steps."""
        every = self._config.checkpoint_every
        return self._manager is not None and (step == self._config.steps or (every is not None and step % every == 0))

    def save(self, step: int, losses: Sequence[float], scaler: GradScaler, *, blocking: bool) -> None:
        """Save a checkpoint, after so many steps with these losses. A broken one of the same step is replaced.

        ``blocking``: return when it is complete.
        """
        assert self._manager is not None
        state = {
            "run": _deciding(self._config, self._text_sha256),
            "losses": torch.tensor(losses, dtype=torch.float64),
            "scaler": scaler,
        }
        saving = self._manager.save(step, state, blocking=blocking, overwrite=self._config.resume == "auto")
        assert saving is not None, "a save waits for the one before"
        self._savings.append(saving)

    def records(self) -> list[SaveRecord]:
        """Return the saves, when all are over."""
        return [
            SaveRecord(
                saving.step,
                saving.total_bytes,
                saving.total_bytes / 1e9 / saving.seconds if saving.seconds else None,
                saving.blocked_ms,
            )
            for saving in self._savings
        ]
