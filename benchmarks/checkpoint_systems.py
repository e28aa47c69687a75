"""The systems that save and load one training, on every rank.

    zero    `ZeroOptimizer` at stage 2 and `CheckpointManager`
    DCP     FSDP2 and `torch.distributed.checkpoint`: the sharded parameters and states of AdamW, by flattened names, as
            one dict of DTensors; so each rank saves the same bytes as with ZeRO, and no time is spent to collect them
    torch   rank 0 alone: `torch.save` of the plain model's and optimizer's state dicts, `torch.load` and
            `load_state_dict`

Knows: the calls of each system. Does not know: clocks, rounds.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

import zero

from .models import Trainable
from .systems import LEARNING_RATE, fully_sharded

ZERO, ZERO_ASYNC = "zero", "zero async"
DCP, DCP_THREAD, DCP_PROCESS, TORCH = "DCP", "DCP thread", "DCP process", "torch"


class SavedTraining:
    """A training that is saved and loaded: a model, its batches, and an optimizer. All ranks make every call."""

    def __init__(self, model: Trainable, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        self._count = 0
        self._last = folder
        self.module = model.build()
        self.optimizer: torch.optim.Optimizer = self._build()

    def _build(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self) -> None:
        """Train for one step."""
        inputs, targets = self._model.batch(self._generator)
        self._model.loss(self.module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, way: str) -> Callable[[], object]:
        """Save, and return what waits until the checkpoint is complete."""
        raise NotImplementedError

    def keep(self) -> None:
        """Save a checkpoint for `load`."""
        raise NotImplementedError

    def load(self) -> None:
        """Load the checkpoint of `keep`."""
        raise NotImplementedError

    def written(self) -> Path:
        """Return where the last checkpoint of `save` lies."""
        return self._last

    def kept(self) -> Path:
        """Return where the checkpoint of `keep` lies."""
        raise NotImplementedError

    def _next(self) -> int:
        self._count += 1
        return self._count


class ZeroSaves(SavedTraining):
    def _build(self) -> torch.optim.Optimizer:
        self._zero = zero.ZeroOptimizer(self.module, torch.optim.AdamW, lr=LEARNING_RATE, fused=True, stage=2)
        self._manager = zero.CheckpointManager(self._folder / "zero", self._zero)
        return self._zero

    def save(self, way: str) -> Callable[[], object]:
        saving = self._manager.save(self._next(), blocking=way == ZERO)
        self._last = saving.path
        return saving.result

    def keep(self) -> None:
        zero.save(self.kept(), self._zero)

    def load(self) -> None:
        zero.load(self.kept(), self._zero, rng=False)

    def kept(self) -> Path:
        return self._folder / "kept-zero"


class DcpSaves(SavedTraining):
    def _build(self) -> torch.optim.Optimizer:
        units = getattr(self.module, "blocks", None) or self.module.units
        fully_sharded(self.module, units)  # type: ignore[arg-type]
        self._group: Any = dist.new_group(backend="gloo")  # of its own: its thread's collectives run beside training's
        return super()._build()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(self.module.state_dict())
        for name, parameter in self.module.named_parameters():
            state |= {f"state.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return state

    def save(self, way: str) -> Callable[[], object]:
        self._last = self._folder / f"{DCP}-{self._next()}"
        if way == DCP:
            save(self._state(), checkpoint_id=self._last, process_group=self._group)
            return lambda: None
        kind = AsyncCheckpointerType.THREAD if way == DCP_THREAD else AsyncCheckpointerType.PROCESS
        future: Any = async_save(
            self._state(), checkpoint_id=self._last, process_group=self._group, async_checkpointer_type=kind
        )
        result: Callable[[], object] = future.result
        return result

    def keep(self) -> None:
        save(self._state(), checkpoint_id=self.kept(), process_group=self._group)

    def load(self) -> None:
        load(self._state(), checkpoint_id=self.kept(), process_group=self._group)

    def kept(self) -> Path:
        return self._folder / f"kept-{DCP}"


class TorchSaves(SavedTraining):
    """Rank 0 alone has the training."""

    def _build(self) -> torch.optim.Optimizer:
        if dist.get_rank():
            self.module = nn.Linear(1, 1)
        return super()._build()

    def step(self) -> None:
        if dist.get_rank() == 0:
            super().step()

    def save(self, way: str) -> Callable[[], object]:
        self._last = self._folder / f"{TORCH}-{self._next()}"
        self._write(self._last)
        return lambda: None

    def _write(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir()
            with (folder / "state.pt").open("wb") as file:
                torch.save({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

    def keep(self) -> None:
        self._write(self.kept())

    def load(self) -> None:
        if dist.get_rank() == 0:
            state = torch.load(self.kept() / "state.pt", weights_only=True)
            self.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def kept(self) -> Path:
        return self._folder / f"kept-{TORCH}"


def system_of(way: str) -> type[SavedTraining]:
    """Return the system of a way to save or load."""
    return TorchSaves if way == TORCH else DcpSaves if way.startswith(DCP) else ZeroSaves


def remove(path: Path) -> None:
    """Remove a checkpoint, on rank 0."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
