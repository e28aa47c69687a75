"""What a dial is: its values, with what they need, and what is refused.

Knows: programs as data, arguments of a `ZeroOptimizer`. Does not know: what a law asks, or how a program is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..support.machine.program import Backward, Command, Config, Setting
from ..support.machine.trees import Part
from ..support.pairs import Row
from ..support.rows import ALL, EVERY

ODD = (
    *(Part("linear", 5), Part("matrix"), Part("tied"), Part("scalar"), Part("one"), Part("empty"), Part("unused", 19)),
    Part("sometimes", of=(Part("linear", 3),)),
    Part("twice", of=(Part("turned"), Part("norm", frozen=True), Part("norm"))),
    Part("checkpoint", of=(Part("linear", 13),)),
)
"""Parameters of all kinds: tied, frozen, unused, sometimes used, used twice, without elements, transposed."""
Changes = Mapping[str, Any]  # of fields of `Config` and `Setting`, by name
Loop = Sequence[Command]
Model = Callable[[], Any]  # returns a model, parameters or param groups


@dataclass(frozen=True)
class Refused:
    """Arguments of a `ZeroOptimizer` that are refused by words of an error, in their order with " … " between them."""

    arguments: Mapping[str, Any]
    words: str
    model: Model = lambda: nn.Linear(3, 3)


@dataclass(frozen=True)
class Differs:
    """Arguments and models of rank 0 and of the others. ``words`` are in the error of every rank."""

    of_first: Mapping[str, Any]
    of_others: Mapping[str, Any]
    words: str
    model: Model = lambda: nn.Linear(3, 3)
    model_of_others: Model | None = None  # None: the same


@dataclass(frozen=True)
class Moment:
    """Calls at a wrong moment, behind which training goes on with the plain loop's bits.

    ``calls``: source text and the words of its error, as of `Wrong`. ``before``: the commands before them; ``after``:
    the remedy. ``changes``: as values of a dial. ``unseen``: the host reads values later, as those of an accelerator.
    """

    calls: Mapping[str, str]
    before: Loop = (Backward(1),)
    after: Loop = ()
    stages: Sequence[int] = (0, 1, 2, 3)
    changes: Changes = field(default_factory=dict)
    unseen: bool = False


@dataclass(frozen=True, kw_only=True)
class Dial:
    """An option, or something that loops do.

    Attributes:
        values: by name, what a value changes in a program; of a dial of loops, the commands. The first is usual.
        first: how many of them the default run pairs with those of other dials; half as many more if it takes all rows.
        needs: whether values of a row go together with a value of this dial that is not the usual one.
        refused: what cannot be.
        differs: what ranks may not give differently.
        moments: calls at a wrong moment.
    """

    name: str
    values: Mapping[str, Changes | Loop]
    first: int = 2
    needs: Callable[[Row], object] = lambda row: True
    refused: Sequence[Refused] = ()
    differs: Sequence[Differs] = ()
    moments: Sequence[Moment] = ()

    @property
    def names(self) -> list[str]:
        """The names of the values that are paired in this run."""
        return list(self.values)[: None if EVERY else self.first * 3 // 2 if ALL else self.first]

    @cached_property
    def usual(self) -> str:
        return next(iter(self.values))

    def allows(self, row: Row) -> bool:
        """Return whether the value that a row has of this dial goes with its other ones."""
        return row[self.name] == self.usual or bool(self.needs(row))


def config_of(row: Row, dials: Sequence[Dial]) -> Config:
    """Return a program without its commands. ``row``: the name of a value by that of its dial."""
    changes: dict[str, Any] = {}
    for dial in dials:
        value = dial.values[row[dial.name]]
        changes |= value if isinstance(value, Mapping) else {}
    return config_with(changes)


def config_with(changes: Changes) -> Config:
    """Return a program of the usual values, but for what changes."""
    own = {field.name for field in fields(Setting)}
    setting = replace(Setting(stage=2, world_size=1), **{name: value for name, value in changes.items() if name in own})
    others = {name: value for name, value in changes.items() if name not in own}
    return Config(**{"setting": setting, "parts": ODD, **others})


def commands_of(row: Row, dials: Sequence[Dial]) -> list[Command]:
    """Return the commands of a row: those of each of its loops, in turn."""
    loops = (dial.values[row[dial.name]] for dial in dials)
    return [command for loop in loops if not isinstance(loop, Mapping) for command in loop]
