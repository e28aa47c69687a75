"""A model of which ranks train some modules apart, each with an optimizer that ignores the others' parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer

from ..support.models import seeded
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_value
from ..support.sides import AsPlain


class Modules(nn.ModuleDict):
    """Layers, of which a forward uses some, and a buffer that each rank changes."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: nn.Linear(3, 3) for name in names})
        self.offset = nn.Buffer(torch.full((3,), 0.5))

    def forward(self, x: Tensor, names: Iterable[str]) -> Tensor:
        for name in names:
            x = x + torch.tanh(self[name](x) + self.offset.to(x.dtype))
        return x


@dataclass(frozen=True)
class Case:
    """Modules, by name, beside one that all ranks train.

    ``groups``: the ranks that train each module; ``orders``: of each rank, its modules as it gives them to a clip;
    ``stages``: of the optimizers of the first module and the others; ``more``: arguments of the first one.
    """

    groups: Mapping[str, tuple[int, ...]]
    orders: tuple[str, ...]
    stages: tuple[int, ...]
    precision: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.orders)

    def build(self) -> Modules:
        return seeded(5, lambda: Modules(("all", *self.groups)))

    def loss_of(self, model: Any, step: int, rank: int) -> Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        out: Tensor = model(x.to(model["all"].weight.dtype), ("all", *sorted(self.orders[rank])))
        return out.float().square().mean()

    def check(self, results: Sequence[tuple[Rank, list[Tensor]]], norm_types: Sequence[float]) -> None:
        """Assert that ranks have the plain loop's last norms, and its parameters of their modules."""
        plain, expected = self.build(), list[Tensor]()
        numbers = {"precision": PRECISIONS.get(self.precision)}
        loop = AsPlain(plain, lambda updated: torch.optim.AdamW(updated, lr=0.05), self.ranks, **numbers)
        for step, norm_type in enumerate(norm_types):
            loop.train(lambda model, rank, step=step: self.loss_of(model, step, rank))  # type: ignore[misc]
            expected.append(loop.clip(0.5, norm_type))
            loop.step()
            loop.clear()
        for rank, norms in results:
            assert_same_value(norms, expected[len(expected) - len(norms) :], "norms")
            for name in rank.all:
                for key, parameter in rank.model[name].named_parameters():
                    assert_same_bits(parameter, plain[name].get_parameter(key), f"{name}.{key}")


class Rank:
    """A rank's model, and its optimizers by name: ``all`` has that of what all ranks train, too."""

    def __init__(self, rank: int, case: Case, groups: Mapping[str, Any]) -> None:
        """``groups``: the ranks of each optimizer of this rank."""
        self.rank, self.model, self.case = rank, case.build(), case
        self.model.offset += rank
        given: dict[str, Any] = {"lr": 0.05, "divisor": case.ranks, "mixed_precision": PRECISIONS.get(case.precision)}
        self.all: dict[str, ZeroOptimizer] = {}
        for number, name in enumerate(("all", *case.groups)):
            if name in groups:
                more = {**case.more, "ignored": [self.model[each] for each in case.groups]} if name == "all" else {}
                module, stage = (
                    self.model if name == "all" else self.model[name],
                    case.stages[number % len(case.stages)],
                )
                self.all[name] = ZeroOptimizer(module, process_group=groups[name], stage=stage, **given, **more)
        self.first, self.also = self.all["all"], [self.all[name] for name in case.orders[rank]]

    def train(self, norm_types: Sequence[float], begin: int = 0) -> list[Tensor]:
        norms = []
        for step, norm_type in enumerate(norm_types, begin):
            self.case.loss_of(self.model, step, self.rank).backward()  # type: ignore[no-untyped-call]
            norms.append(self.first.clip_grad_norm_(0.5, norm_type, also=self.also))
            for each in self.all.values():
                each.step()
                each.zero_grad()
        return norms

    def close(self) -> None:
        assert self.model.offset.eq(0.5).all()
        for each in reversed(self.all.values()):
            each.close()


def groups_on(transport: Transport, case: Case) -> dict[str, Transport]:
    of = enumerate(case.groups.items(), start=1)
    own = {name: transport.split(ranks, number) for number, (name, ranks) in of if transport.rank in ranks}
    return {"all": transport, **own}


IN_A_RING = Case({"a": (0, 1), "b": (1, 2), "c": (0, 2)}, ("ac", "ba", "cb"), (2,))
"""If ranks entered their further optimizers in the order in which they give them, every rank would wait."""
