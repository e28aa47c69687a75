"""One rank of a program: it executes the commands with `ZeroOptimizer` instead of torch's optimizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

from collectives import Algorithm
from zero import Offload, ZeroOptimizer

from ..plain import clear
from . import program as p
from .program import Command, Config, Setting
from .trees import Batch, PlannedError

Saved = tuple[dict[str, Any], dict[str, Any]]  # the state dicts of the model and of the optimizer


class Rank:
    """Executes the commands on one rank, over a transport or a process group.

    ``algorithms``: names for a setting's ``collective`` beside those of `collectives`.
    """

    algorithms: ClassVar[Mapping[str, Algorithm]] = {}

    def __init__(self, config: Config, setting: Setting, group: Any, rank: int, saved: Saved | None = None) -> None:
        self.setting, self.rank = setting, rank
        self.model = config.model(config.seed + rank)  # construction must give all ranks the values of rank 0
        if saved is not None:
            if config.mixed is None:
                self.model.load_state_dict(saved[0])
            for parameter, trainable in zip(self.model.parameters(), saved[1].pop("trainable"), strict=True):
                parameter.requires_grad_(trainable)
        cls, arguments = config.optimizer_class
        self.optimizer = ZeroOptimizer(
            config.groups(self.model),
            cls,
            module=self.model,
            process_group=group,
            stage=setting.stage,
            bucket_cap_mb=setting.bucket_cap_mb,
            collective=self.algorithms.get(setting.collective, setting.collective),
            sharding_factor=setting.sharding_factor,
            reshard_after_forward=setting.reshard,
            offload=Offload(tempfile.gettempdir()) if setting.offload else None,
            mixed_precision=config.mixed,
            **arguments,
        )
        self.scheduler = p.scheduler_of(self.optimizer)
        if saved is not None:
            if config.mixed is not None:  # the saved weights have another dtype; the new model alone would round them
                with self.optimizer.gathered(write=True):
                    self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
        self.listed = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self.kept: list[Any] = []

    def do(self, command: Command) -> Any:
        """Execute a command; return this rank's result."""
        match command:
            case p.Backward():
                self._run(p.backwards(self.model, self.setting, command, self.rank), command.sync)
            case p.Uneven():
                for turn in command.of(self.rank):
                    self._run(p.backwards(self.model, self.setting, turn, self.rank), command.sync)
                self.optimizer.check_replicas()
            case p.Keep():
                kept = p.Backward(command.seed, "one", command.mask)
                self.kept = p.backwards(self.model, self.setting, kept, self.rank)
            case p.BackwardOfKept():
                self._run(self.kept, command.sync)
                self.kept = []
            case p.Fail():
                self._fail(command)
            case p.Clip():
                return self.optimizer.clip_grad_norm_(command.max_norm, command.norm_type)
            case p.Divide():
                self.optimizer.divisor = command.by
            case p.Step():
                self.optimizer.step()
                return self._read(None) if command.look else None
            case p.Scaled():
                return self._scaled_step(command)
            case p.Joined():
                return self._joined_steps(command)
            case p.ZeroGrad():
                clear(self.model, self.optimizer, command.how)
            case p.Freeze():
                for parameter in p.chosen(self.model, command.numbers):
                    parameter.requires_grad_(not parameter.requires_grad)
            case p.Change():
                p.change(self.optimizer, command)
            case p.Schedule():
                self.scheduler.step()
                return [group["lr"] for group in self.optimizer.param_groups]
            case p.Evaluate():
                return p.evaluate(self.model, self.setting, command)
            case p.Read():
                return self._read(command.numbers)
            case p.Write():
                parameters = p.chosen(self.model, command.numbers)
                with self.optimizer.gathered(None if command.numbers is None else parameters, write=True):
                    for parameter in parameters:
                        p.edit(parameter, command.seed, self.rank)
            case p.Edit():
                self._edit(command)
            case p.FullGrad():
                return self.optimizer.full_grad(p.chosen(self.model, (command.number,))[0])
            case p.Describe():
                self.optimizer.describe()
                repr(self.optimizer)
                self.optimizer.check_replicas()
            case p.Consolidate():
                self.optimizer.consolidate_state_dict(command.to)
                return self.optimizer.state_dict() if self.rank == command.to else None
        return None

    def _scaled_step(self, command: p.Scaled) -> Any:
        self.optimizer.zero_grad()
        scaler = p.scaler_of(command)
        scaler.scale(p.loss_to_scale(self.model, self.setting, command, self.rank)).backward()
        scaler.unscale_(self.optimizer)
        norm = self.optimizer.clip_grad_norm_(1.0)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return norm, scaler.get_scale() < command.scale, self._read(None)

    def _joined_steps(self, command: p.Joined) -> Any:
        self.optimizer.zero_grad()
        with self.optimizer.join():
            for step in range(command.of(self.rank)):
                backward = p.Backward(command.seed + step)
                self._run(p.backwards(self.model, self.setting, backward, self.rank), True)
                self.optimizer.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self._read(None)

    def save(self) -> Saved:
        """Save the program's state. All ranks call this; rank 0's result is complete."""
        self.optimizer.consolidate_state_dict(0)
        with self.optimizer.gathered():
            model = {name: value.clone() for name, value in self.model.state_dict().items()}
        trainable = [parameter.requires_grad for parameter in self.model.parameters()]
        states = self.optimizer.state_dict() if self.rank == 0 else {}
        return model, {**states, "trainable": trainable}

    def close(self) -> list[Any]:
        """End the program, and return the parameters of the plain model."""
        self.kept = []
        self.optimizer.close()
        return p.values(list(self.model.parameters()))

    def _run(self, backwards: list[Any], sync: bool) -> None:
        with nullcontext() if sync else self.optimizer.no_sync():
            for backward in backwards:
                backward()

    def _read(self, numbers: p.Numbers) -> Any:
        parameters = p.chosen(self.model, numbers)
        with self.optimizer.gathered(None if numbers is None else parameters):
            return p.values(parameters)

    def _edit(self, command: p.Edit) -> None:
        parameter = p.chosen(self.model, (command.number,))[0]
        if self.setting.stage == 3:
            with pytest.raises(RuntimeError, match="gathered"), torch.no_grad():
                parameter.mul_(command.factor)
        else:
            with torch.no_grad():
                parameter.mul_(command.factor)

    def _fail(self, command: p.Fail) -> None:
        failing = p.micro_batch(self.setting, command.seed, -1, self.rank, fails=True)
        if not command.in_block:
            with pytest.raises(PlannedError):
                self.model(failing)
            return
        with pytest.raises(PlannedError):
            self._fail_in_block(p.backwards(self.model, self.setting, p.Backward(command.seed), self.rank), failing)

    def _fail_in_block(self, backwards: list[Any], failing: Batch) -> None:
        with self.optimizer.no_sync():
            for backward in backwards:
                backward()
            self.model(failing)
