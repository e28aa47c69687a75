"""Models of which classes step some parameters whole or in blocks, and their trainings beside the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support import sides
from ..support.machine.classes import InBlocks, name_of
from ..support.models import seeded
from ..support.plain import assert_same_bits, assert_same_model, assert_same_value
from ..support.sides import AsPlain, OnRank

MICRO_BATCHES = 6  # of a step
QKV = [16, 8, 8]
Groups = list[dict[str, Any]]
Named = list[tuple[str, Any]]


class Mixed(nn.Module):
    """Matrices and vectors, for one class each: some unused, frozen, tied, and in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.blocks[1][2].weight = nn.Parameter(self.blocks[1][2].weight.detach().t().contiguous().t())
        self.norm, self.unused, self.frozen = nn.LayerNorm(8), nn.Linear(3, 5), nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.frozen(self.norm(x))


class Stacks(nn.Module):
    """Experts in two tensors, of which one has odd matrices, and fused projections. One stack is unused, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(32, 4)
        self.up = nn.Parameter(torch.randn(5, 16, 24) / 4)
        self.down = nn.Parameter(torch.randn(5, 24, 16) / 5)
        self.odd = nn.Parameter(torch.randn(1, 7, 3, 5) / 2)
        self.qkv = nn.Parameter(torch.randn(32, 16) / 4)
        self.unused = nn.Parameter(torch.randn(3, 8, 8))
        self.frozen = nn.Parameter(torch.randn(3, 16, 16) / 8, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + torch.einsum("bd,edh,ehf->bf", x, self.up, self.down).tanh()
        x = x + torch.einsum("bd,edf->bf", x, self.frozen)
        x = x + (x[:, :3] @ self.odd[0]).tanh().sum(0).repeat(1, 4)[:, :16]
        found: Tensor = self.leave(x @ self.qkv.t())
        return found


class Large(nn.Module):
    """Matrices of two pieces or more, of which one is frozen, and parameters around the limits of 8-bit classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.frozen = nn.Linear(8, 1408), nn.Linear(1408, 8), nn.Linear(8, 1024)
        self.frozen.weight.requires_grad_(False)
        self.rest = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (4095, 4096, 4097, 4352, 8192, 8448)])

    def forward(self, x: Tensor) -> Tensor:
        rest = sum((p * x.sum()).sin().mean() for p in self.rest)
        return self.last(torch.tanh(self.first(x))) + self.frozen(x).mean() + rest


def shared(model: nn.Module) -> tuple[Named, Named]:
    """Return the matrices of the blocks, and all else."""
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.dim() == 2 and name.startswith("blocks")]
    return matrices, [(name, p) for name, p in named if all(p is not q for _, q in matrices)]


def of_one_class(model: nn.Module, **options: Any) -> Groups:
    return [{"params": list(model.named_parameters()), **options}]


whole, in_pieces = (partial(of_one_class, partition=kind) for kind in ("parameter", "block"))


def groups_of(model: nn.Module) -> Groups:
    """Return param groups of Muon and AdamW."""
    matrices, rest = shared(model)
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02, "weight_decay": 0.1},
        {"params": rest[::2], "optimizer_class": torch.optim.AdamW, "lr": 0.01},
        {"params": rest[1::2], "optimizer_class": torch.optim.AdamW, "lr": 0.005, "weight_decay": 0.0},
    ]


def in_two(model: nn.Module) -> Groups:
    """Return a group of the matrices, and one of all else."""
    return [{"params": params, "lr": 0.02} for params in shared(model)]


def stacks_of(model: nn.Module, cls: Any = torch.optim.Muon, sizes: Any = QKV) -> Groups:
    """Return param groups of matrices, of all else, and of blocks."""
    named = dict(model.named_parameters())
    of_blocks = {"optimizer_class": cls, "lr": 0.02}
    stacks = [(name, named.pop(name)) for name in ("up", "down", "unused", "frozen")]
    odd, qkv, matrix = ([(name, named.pop(name))] for name in ("odd", "qkv", "leave.weight"))
    return [
        {**of_blocks, "params": matrix, "partition": "parameter"},
        {"params": list(named.items()), "lr": 0.01},
        {**of_blocks, "params": odd, "blocks": 1, "lr": 0.05},
        {**of_blocks, "params": qkv, "blocks": sizes},
        {**of_blocks, "params": stacks, "blocks": 0},
    ]


# -- the plain loop ----------------------------------------------------------------------------------------------------


class PlainGroups(InBlocks):
    """The plain loop's optimizers: one of each class, whose parameters are those of the groups, or their blocks."""

    def __init__(self, groups: Groups, stepped: Mapping[int, Tensor], training: Training) -> None:
        """``stepped``: what is stepped for each of the model's parameters, by its id."""
        self.training = training
        groups = [{**group, "params": [(name, stepped[id(p)]) for name, p in group["params"]]} for group in groups]
        super().__init__(training.cls, training.options, groups)
        of_each = [(name_of(cls), group["params"]) for cls, group in zip(self.classes, groups, strict=True)]
        self.listed = [(cls, p) for cls, members in of_each for _, p in members]

    def made(self, cls: Any, groups: Groups, arguments: Mapping[str, Any]) -> Any:
        first = groups[:1] if self.training.rounding else groups  # a rounded step makes the states of an added one
        found = cls(first, **arguments, **self.training.built.get(cls, {}))
        for group in groups[len(first) :]:
            found.add_param_group(group)
        return found

    def states(self) -> dict[str, dict[int, Any]]:
        """Return the states of each class: those of blocks together, as those of their parameter."""
        found: dict[str, list[Any]] = {name: [] for name in self.all}
        for name, p in self.listed:
            parts = self.parts_of(p)
            states = [self.all[name].state.get(part, {}) for part in parts]
            found[name].append({key: as_one([state[key] for state in states], parts, p) for key in states[0]})
        return {name: {n: state for n, state in enumerate(states) if state} for name, states in found.items()}

    def masters(self, name: str) -> list[Tensor]:
        """Return what is stepped of a class, by the index in its state dict."""
        return [p for cls, p in self.listed if cls == name]


def as_one(values: list[Any], parts: Sequence[Tensor], p: Tensor) -> Any:
    """Return the state of a parameter, given those of its blocks."""
    if parts[0] is p:
        return values[0]
    if isinstance(values[0], Tensor) and values[0].shape == parts[0].shape:
        return torch.cat([value.reshape(-1) for value in values]).view(p.shape)
    same = all(torch.equal(value, values[0]) if isinstance(value, Tensor) else value == values[0] for value in values)
    return values[0] if same else torch.stack(values)


# -- trainings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A number of ranks, and how they share a model."""

    ranks: int
    stage: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """A training. ``cls``: of groups without one, with the arguments ``options``; ``built``: the arguments of others.

    ``added``: how many groups are added to the others, which come first; ``counted``: whether the formulas know the
    bytes of the states.
    """

    build: Callable[[], nn.Module] = Mixed
    groups: Callable[[Any], Groups] = of_one_class
    cls: Any = torch.optim.AdamW
    options: Mapping[str, Any] = field(default_factory=dict)
    built: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    added: int = 0
    counted: bool = True
    precision: Any = None
    rounding: Any = None

    def plain(self) -> AsPlain:
        model = made(self.build)
        for group in self.groups(model)[-self.added :] if self.added and self.precision else ():
            for _, p in group["params"]:  # it is cast with the model before it is listed
                p.data = p.to(self.precision.param_dtype).to(p.dtype)

        def optimizer_of(updated: Sequence[Tensor]) -> Any:
            return PlainGroups(self.groups(model), dict(zip(map(id, model.parameters()), updated, strict=True)), self)

        numbers = {"precision": self.precision, "rounding": self.rounding}
        return AsPlain(model, optimizer_of, divisor=MICRO_BATCHES, **numbers)

    def begun(self, model: nn.Module, transport: Transport, place: Place) -> ZeroOptimizer:
        groups = self.groups(model)
        first = groups[: len(groups) - self.added]
        given = {"bucket_cap_mb": 0.01, "divisor": MICRO_BATCHES, "stage": place.stage, "process_group": transport}
        given |= {"module": model, "mixed_precision": self.precision, "rounding": self.rounding, **place.settings}
        optimizer = ZeroOptimizer(first, self.cls, optimizer_kwargs=dict(self.options), **given)
        for group in groups[len(first) :]:
            optimizer.add_param_group(group)
        return optimizer

    def on(self, place: Place, run: Callable[[Any, ZeroOptimizer], Any]) -> list[Any]:
        """Call ``run`` on every rank. Return its results; if it returns None, the model and the optimizer's dict."""
        models = [made(self.build) for _ in range(place.ranks)]

        def program(transport: Transport) -> Any:
            model = models[transport.rank]
            optimizer = self.begun(model, transport, place)
            found = run(model, optimizer)
            told = optimizer.describe()
            for what in ("parameters", "gradients", *(["optimizer"] if self.counted else [])):
                assert told.formula_bytes[what] == told.bytes[what], what
            if found is None:
                optimizer.consolidate_state_dict(None)
                found = model, optimizer.state_dict()
            optimizer.close()
            return found

        return on_threads(place.ranks, program, timeout=20)


def assert_goes_on(training: Training, before: Place, after: Place, how: str, folder: Path) -> None:
    """Assert that a training has the plain loop's weights and states, before and after it goes on at another place.

    ``how``: from a "checkpoint", which has the bytes of that of one rank; from a "dict", or from one "of the class".
    """
    plain = training.plain()
    train(plain, range(2))

    def begin(place: Place) -> list[Any]:
        def run(model: nn.Module, optimizer: ZeroOptimizer) -> None:
            train(OnRank(model, optimizer), range(2))
            zero.save(folder / f"{place.ranks}", optimizer)

        return training.on(place, run)

    begun = begin(before)
    assert_same(begun, plain)
    if how == "checkpoint" and before.ranks > 1:
        begin(Place(1, 0))
        one, several = ((folder / f"{ranks}" / "optimizer").iterdir() for ranks in (1, before.ranks))
        assert {path.name: path.read_bytes() for path in one} == {path.name: path.read_bytes() for path in several}
    weights = {name: value.clone() for name, value in plain.model.state_dict().items()}
    saved = {name: each.state_dict() for name, each in plain.optimizer.all.items()}
    saved = saved if len(saved) > 1 else next(iter(saved.values()))

    def go_on(model: nn.Module, optimizer: ZeroOptimizer) -> None:
        if how == "checkpoint":
            zero.load(folder / f"{before.ranks}", optimizer, rng=False)
        else:
            with optimizer.gathered(write=True):
                model.load_state_dict(weights)
            optimizer.load_state_dict(begun[0][1] if how == "dict" else saved)
        train(OnRank(model, optimizer), range(2, 4))

    continued = training.on(after, go_on)
    train(plain, range(2, 4))
    assert_same(continued, plain)


def assert_same(results: list[tuple[nn.Module, dict[str, Any]]], plain: AsPlain) -> None:
    """Assert that every rank has the plain loop's weights and states."""
    expected: dict[str, Any] = plain.optimizer.states()
    for model, found in results:
        assert_same_model(model, plain.model)
        by_class = found if "state" not in found else dict.fromkeys(expected, found)
        assert_same_value({name: each["state"] for name, each in by_class.items()}, expected, "states")
        for name, each in by_class.items():
            for index, master in each.get("masters", {}).items():
                assert_same_bits(master, plain.optimizer.masters(name)[index].detach(), f"master {index}")


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 8, generator=generator) for _ in range(MICRO_BATCHES)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x.to(next(model.parameters()).dtype)).square().mean()
    return found


def train(side: Any, steps: range = range(3)) -> None:
    sides.train(side, steps, batches, loss_of, 0.5)


def made(build: Callable[[], nn.Module] = Mixed) -> Any:
    return seeded(0, build)
