"""One rank of a program: it executes the commands with `ZeroOptimizer` instead of torch's optimizer."""

from __future__ import annotations

import contextlib
import copy
import pickle
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Algorithm, solo
from zero import CheckpointManager, Offload, ShardedAverage, ZeroOptimizer, load, save

from ..errors import assert_in_order, error_of
from ..narrowed import sum_dtypes
from ..plain import assert_same_value
from ..sides import OnRank
from . import program as p
from .classes import BY_PARAMETER
from .player import Player
from .program import Config, Setting
from .trees import Leaf, PlannedError, Tree, Wrapper

UNIT_ARGUMENTS: dict[str, dict[str, Any]] = {
    "inside units": {"units": lambda module: isinstance(module, (Leaf, Wrapper))},
    "inside units, none ahead": {"units": lambda module: isinstance(module, (Leaf, Wrapper)), "prefetch_depth": 0},
    "inside units, kept": {
        "units": lambda module: isinstance(module, (Leaf, Wrapper)),
        "prefetch_depth": 2,
        "reshard_after_forward": lambda module: isinstance(module, Leaf),
    },
    "three ahead": {"prefetch_depth": 3},
}
"""How the units of a tree may be chosen and gathered, by name."""
OFFLOADS = {
    "states on the host": Offload("cpu"),
    "parameters on the host": Offload("cpu", parameters="cpu"),
    "stepped on the host": Offload("cpu", parameters="cpu", step="cpu"),
}
STATES = {"states on the host": Offload("cpu")}


class Refusing(torch.optim.SGD):
    """Cannot be built for further parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise PlannedError("in the constructor of a class")


Saved = tuple[dict[str, Any], dict[str, Any]]  # the state dicts of the model and of the optimizer


class Rank(OnRank, Player):
    """Plays one rank, over a transport or a process group.

    ``algorithms``: names for a setting's ``collective`` beside those of `collectives`. ``offload_at_stage_3``: instead
    of a place on disk; the class steps on the host if a setting offloads.
    """

    algorithms: ClassVar[Mapping[str, Algorithm]] = {}
    offload_at_stage_3: ClassVar[Offload | None] = None
    built: ClassVar[weakref.WeakSet[ZeroOptimizer]] = weakref.WeakSet()  # those that are alive, of all ranks

    def __init__(self, config: Config, setting: Setting, group: Any, rank: int, saved: Saved | None = None) -> None:
        self.config, self.setting, self.rank = config, setting, rank
        self.refuses = False  # the function of precisions raises
        self.group = group
        with torch.device("meta") if config.meta else contextlib.nullcontext():
            model = config.model(config.seed + rank)  # construction must give all ranks the values of rank 0
        self.given = config.model(config.seed).state_dict() if config.meta else None
        full = saved is not None and saved[1].pop("full", False)
        folder = None if saved is None else saved[1].pop("folder", None)
        kinds = [] if saved is None else saved[1].pop("averages", [])
        if saved is not None:
            if config.mixed is None and not full and not folder:
                if config.meta:
                    self.given = saved[0]
                else:
                    model.load_state_dict(saved[0])
            for parameter, trainable in zip(model.parameters(), saved[1].pop("trainable"), strict=True):
                parameter.requires_grad_(trainable)
        if config.alias:
            self._refuse_alias(model, group)
        optimizer = self._build(model, group)
        self.built.add(optimizer)
        super().__init__(model, optimizer)
        self.scheduler = p.scheduler_of(optimizer)
        self.averages: dict[str, ShardedAverage] = {}
        if hasattr(optimizer, "train"):
            optimizer.train()
        for kind in kinds:
            self._average_of(kind)
        if folder:
            restored = load(folder, optimizer, rng=False)
            again = save(folder, optimizer, step=1, overwrite=True).result()
            assert again == restored.content, "another topology writes other bytes"
        elif saved is not None:
            if full:
                optimizer.load_full_state_dict(saved[0] if rank == setting.world_size - 1 else None)
            elif config.mixed is not None:  # the saved weights have another dtype; the new model alone would round them
                with optimizer.gathered(write=True):
                    model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        self.listed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.kept = []

    def _offload(self, setting: Setting) -> Offload | None:
        if setting.stage == 3 and self.offload_at_stage_3:
            return replace(self.offload_at_stage_3, step="cpu" if setting.offload else None)
        if isinstance(setting.offload, str):
            return (OFFLOADS | STATES)[setting.offload]
        return Offload(tempfile.gettempdir()) if setting.offload else None

    def _build(self, model: Tree, group: Any) -> ZeroOptimizer:
        config, setting = self.config, self.setting
        cls, arguments = config.optimizer_class
        with torch.inference_mode() if config.inference else contextlib.nullcontext():
            return ZeroOptimizer(
                config.groups(model),
                cls,
                module=model,
                **self._places(setting, group),
                stage=setting.stage,
                bucket_cap_mb=setting.bucket_cap_mb,
                collective=self.algorithms.get(setting.collective, setting.collective),
                **self._units(config, setting),
                offload=self._offload(setting),
                mixed_precision=self._mixed(),
                **({"init_state_dict": self.given} if config.meta else {}),
                **({"rounding": config.rounding} if config.rounded else {}),  # `tests.net` runs on commits without it
                **arguments,
            )

    def _refuse_alias(self, model: Tree, group: Any) -> None:
        """Assert that a model whose first parameter shares memory is refused by name, and stays as it is."""
        before, first = p.values(list(model.parameters())), model.first.weight
        place, alias = first.data_ptr(), first.detach()[:2]
        if self.config.alias == "buffer":
            model.register_buffer("alias", alias)
        else:
            model.register_parameter("alias", nn.Parameter(alias, self.config.alias == "trained"))
        with pytest.raises(ValueError, match=r"'(alias|first\.weight)' and '(alias|first\.weight)' share memory"):
            self._build(model, group)
        del model.alias
        assert first.data_ptr() == place
        assert_same_value(p.values(list(model.parameters())), before, "after an error")

    def _mixed(self) -> Any:
        """Return the precision. A function raises where `fail_to_add` lets it."""
        mixed = self.config.mixed
        if not callable(mixed):
            return mixed

        def of(name: str, module: Any) -> Any:
            if self.refuses:
                raise PlannedError("in a function of precisions")
            return mixed(name, module)

        return of

    @staticmethod
    def _places(setting: Setting, group: Any) -> dict[str, Any]:
        """Return the arguments that say which ranks there are, and which share a copy."""
        if setting.mesh:
            return {"mesh": group}
        return {"process_group": group, "sharding_factor": setting.sharding_factor}

    @staticmethod
    def _units(config: Config, setting: Setting) -> dict[str, Any]:
        """Return the arguments that say how units are chosen and gathered."""
        reshard = {"reshard_after_forward": setting.reshard}
        return reshard if not (setting.units and config.parts) else reshard | UNIT_ARGUMENTS[setting.units]

    def run(self, rank: int, backwards: list[Any], sync: bool) -> None:
        with contextlib.nullcontext() if sync else self.optimizer.no_sync():
            for backward in backwards:
                backward()

    def check(self) -> None:
        self.optimizer.describe()
        repr(self.optimizer)
        self.optimizer.check_replicas()

    def check_bytes(self) -> None:
        """Assert that the rank holds what the formulas say."""
        told = self.optimizer.describe()
        # the formula knows no count of a class with states of other shapes, nor of what is reserved and not yet used
        known = not BY_PARAMETER.keys() & {self.config.optimizer, *self.config.classes}
        known = known and self.setting.offload != "states on the host"
        for kind in ("parameters", "gradients", *(["optimizer"] if known else [])):
            before = kind == "gradients" and told.bytes[kind] == 0  # no reduction has needed a buffer yet
            assert before or told.bytes[kind] == told.formula_bytes[kind], f"{kind}\n{told}"

    def measure(self, command: p.Measure) -> int:
        before = self.optimizer.traffic
        backwards, rest = command.commands[: command.turns], command.commands[command.turns :]
        for each in (*backwards, replace(rest[0], look=False), *rest[1:]):
            self.do(each)
        sent = (self.optimizer.traffic - before).payload_sent
        told = self.optimizer.describe()
        for peak in ("gathered_peak", "scratch_peak"):
            assert told.bytes[peak] <= told.formula_bytes[peak], f"{peak}\n{told}"
        return sent - (0 if self.rank else told.formula_traffic_bytes(command.turns, command.turns))

    def refuse(self, command: p.Wrong) -> None:
        """Assert that a call is refused, or has no error if its words are "nothing"."""
        assert_in_order(command.words, self.error_of(command))

    def error_of(self, command: p.Wrong) -> str:
        """Return the error of a call, whose text may name all that `zero` exports, and the functions below."""

        def within(context: Any, call: Callable[[], Any]) -> Any:
            with context:
                return call()

        def in_backward(call: Callable[[], Any]) -> None:
            with self.model.last.bias.register_post_accumulate_grad_hook(lambda _: call()):
                self.run(self.rank, p.backwards(self.model, self.setting, p.Backward(0), self.rank), True)

        def backward() -> None:
            self.run(self.rank, p.backwards(self.model, self.setting, p.Backward(0), self.rank), True)

        def kept() -> None:
            self.run(self.rank, self.kept[0][1], True)

        def edited(change: Callable[[list[dict[str, Any]]], object], call: Callable[[], Any]) -> None:
            """Edit the param groups of the last rank for a call."""
            groups = self.optimizer.param_groups
            kept = [(group, dict(group), list(group["params"])) for group in groups]
            if self.rank == self.setting.world_size - 1:
                change(groups)
            try:
                call()
            finally:
                groups[:] = [group for group, _, _ in kept]
                for group, options, parameters in kept:
                    group.update(options, params=parameters)

        def unscale(scale: float = 64.0) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.ones(()))
            scaler.unscale_(self.optimizer)

        named = {name: getattr(zero, name) for name in dir(zero) if not name.startswith("_")}
        named |= {"rank": self.rank, "group": self.group, "contextlib": contextlib}
        named |= {
            "torch": torch,
            "copy": copy,
            "pickle": pickle,
            "model": self.model,
            "optimizer": self.optimizer,
        }
        named |= {"average": self.averages.get("mean"), "p": self.model.first.weight}
        named |= {call.__name__: call for call in (within, backward, in_backward, edited, kept, unscale, solo)}
        return error_of(lambda: eval(command.call, named))

    def fail(self, command: p.Fail) -> None:
        with pytest.raises(PlannedError), self.optimizer.no_sync() if command.in_block else contextlib.nullcontext():
            self._fail(command)

    def _fail(self, command: p.Fail) -> None:
        if command.in_block:
            self.run(self.rank, p.backwards(self.model, self.setting, p.Backward(command.seed), self.rank), True)
        self.model(p.micro_batch(self.setting, command.seed, -1, self.rank, fails=True))

    def reset(self, parameters: Sequence[Tensor]) -> None:
        self.optimizer.reset_states(q for q in parameters if id(q) in self.listed)

    def lend(self) -> None:
        self.optimizer.offload()
        self.optimizer.reload()

    def averaged(self, command: p.Average) -> Any:
        average = self._average_of(command.kind)
        average.update_parameters()
        found = average.gather(None) or {}
        names = {name for name, q in self.model.named_parameters() if id(q) in self.listed}
        with average.applied():
            seen = self.forward(p.Evaluate(7))
        return {name: p.laid_out(value) for name, value in found.items() if name in names}, seen

    def _average_of(self, kind: str) -> ShardedAverage:
        if kind not in self.averages:
            name = kind.replace(" ", "-")
            self.averages[kind] = ShardedAverage(self.optimizer, name=name, **p.AVERAGES[kind])
        return self.averages[kind]

    def roll_back(self, command: p.RollBack) -> None:
        with CheckpointManager(command.folder, self.optimizer) as manager:
            manager.save(2)
            self.whole_step(command.seed)
            manager.save(4)
            manager.restore(2, rng=False)
            self.whole_step(command.seed + 1)
            manager.save(4)

    def fail_to_add(self, command: p.FailToAdd) -> None:
        parameters = list(self.model.parameters())
        others = [q for q in parameters if id(q) not in self.listed and q.requires_grad and q.grad is None]
        is_function = callable(self.config.mixed)
        twice = command.why == "twice" or (command.why == "precision" and not is_function)
        group: dict[str, Any] = {"params": parameters[:1] if twice or not others else others[:1]}
        if command.why == "class" or (command.why == "class, rank 0" and not self.rank):
            group["optimizer_class"] = Refusing
        dtypes, hooks = [q.dtype for q in parameters], self._hooks()
        self.refuses = command.why == "precision" and is_function
        with pytest.raises((PlannedError, RuntimeError, ValueError)):
            self.optimizer.add_param_group(group)
        self.refuses = False
        assert (dtypes, hooks) == ([q.dtype for q in parameters], self._hooks())
        assert self.listed == {id(q) for g in self.optimizer.param_groups for q in g["params"]}

    def _hooks(self) -> list[int]:
        """Return how many hooks each module and each parameter has."""
        found = [h for part in self.model.modules() for h in (part._forward_pre_hooks, part._forward_hooks)]
        found += [h for q in self.model.parameters() for h in (q._post_accumulate_grad_hooks, q._backward_hooks)]
        return [len(hooks or ()) for hooks in found]

    def edit(self, parameter: Tensor, factor: float) -> None:
        with pytest.raises(RuntimeError, match="gathered") if self.setting.stage == 3 else contextlib.nullcontext():
            super().edit(parameter, factor)

    def full_gradient(self, index: int) -> Tensor | None:
        return self.optimizer.full_grad(list(self.model.parameters())[index])

    def set_gradient(self, index: int, gradient: Tensor | None, *, alike: bool = False) -> None:
        parameter = list(self.model.parameters())[index]
        if gradient is not None:
            gradient = gradient.to(sum_dtypes(self.model, self.config.mixed)[parameter])
            if self.rank and not alike:
                gradient = torch.zeros_like(gradient)  # rank 0's counts
        self.optimizer.set_full_grad(parameter, gradient)

    def scaled_step(self, command: p.Scaled) -> Any:
        self.clear()
        scaler = torch.amp.GradScaler(self.config.device, init_scale=command.scale)
        part, optimizers = p.part_of(command, self.rank), [self.optimizer]
        if part is not None:
            divisor = self.divisor if command.beside == "also" else 1
            own: dict[str, Any] = {"stage": 0, "process_group": solo(), "divisor": divisor, "lr": 0.1}
            optimizers.append(ZeroOptimizer(part, torch.optim.SGD, **own))
        scaler.scale(p.loss_to_scale(self.model, self.setting, command, self.rank, part)).backward()
        if command.sets:
            self._set(p.SetGrad(0, command.seed))
        for each in optimizers if command.unscale else ():
            scaler.unscale_(each)
        also = {"also": optimizers[1:]} if command.beside == "also" else {}
        norms = [self.clip(1.0, **also)] if command.unscale else []
        if command.beside == "over":
            norms.append(optimizers[1].clip_grad_norm_(1.0, over=self.group))
        for each in optimizers:
            scaler.step(each)
        if command.further:
            scaler.scale(p.loss_to_scale(self.model, self.setting, command, self.rank)).backward()
        scaler.update()
        self.clear()
        for each in optimizers[1:]:
            each.close()
        seen = norms, scaler.get_scale() < command.scale, self.read(None)
        return *seen, None if part is None else p.values(list(part.parameters()))

    def consolidated(self, to: int) -> dict[str, Any] | None:
        self.optimizer.consolidate_state_dict(to)
        return self.optimizer.state_dict() if self.rank == to else None

    def full_state(self, to: int, *, masters: bool) -> dict[str, Any] | None:
        return self.optimizer.full_state_dict(to, masters=masters)

    def save(self, command: p.Load) -> Saved:
        """Save the program's state. All ranks call this; rank 0's result is complete."""
        if command.folder:
            save(command.folder, self.optimizer, overwrite=True)
            return {}, {**self._trainable(), "folder": command.folder, "averages": list(self.averages)}
        states = self.consolidated(0)
        if command.full:
            return self.full_state(0, masters=True) or {}, {
                **_without_masters(states or {}),
                **self._trainable(),
                "full": True,
            }
        with self.gathered():
            model = {name: value.clone() for name, value in self.model.state_dict().items()}
        return model, {**(states or {}), **self._trainable()}

    def _trainable(self) -> dict[str, Any]:
        return {"trainable": [parameter.requires_grad for parameter in self.model.parameters()]}

    def close(self) -> list[torch.Tensor]:
        """End the program, and return the parameters of the plain model."""
        self.kept = []
        self.optimizer.close()
        return p.values(list(self.model.parameters()))


def _without_masters(states: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict, of one class or by class, without its master weights."""
    found = {key: value for key, value in states.items() if key != "masters"}
    return found if "state" in found else {name: _without_masters(of_class) for name, of_class in found.items()}
