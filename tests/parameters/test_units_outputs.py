"""Outputs of units at stage 3, and edits of them.

Each case has the plain loop's bits, and afterwards no unit is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ..support.cases import WIDTH, WORLD_SIZES, Batch, Block, Case, Net, check, loss_of, net_of

# -- outputs ----------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    hidden: Tensor
    note: Any = None


class Named(NamedTuple):
    hidden: Tensor
    aside: Tensor


class Opaque:
    """An output that the library cannot look into."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


PACKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "a named tuple": (lambda x: Named(x, x * 2), lambda out: out.hidden + out.aside),
    "a list": (lambda x: [x, [x * 2]], lambda out: out[1][0]),
    "a dict": (lambda x: {"a": {"b": x}, "c": None}, lambda out: out["a"]["b"]),
    "a dataclass": (lambda x: Answer(x.detach(), Answer(x)), lambda out: out.note.hidden),
    "an opaque object": (Opaque, lambda out: out.hidden),
    "an opaque object in a list": (lambda x: [Opaque(x), x.detach()], lambda out: out[0].hidden + out[1]),
}


def packing(name: str) -> type[Net]:
    pack, unpack = PACKS[name]

    class Packed(Block):
        def forward(self, x: Tensor) -> Any:
            return pack(super().forward(x))

    class Unpacks(net_of(Packed)):  # type: ignore[misc]
        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = unpack(block(x))
            return x

    return Unpacks


class GivesNone(Block):
    result: Tensor | None = None

    def forward(self, x: Tensor) -> None:
        self.result = super().forward(x)


class TakesResults(net_of(GivesNone)):  # type: ignore[misc]
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert block(x) is None
            x, block.result = block.result, None
        return x


class GivesNumbers(Block):
    """A unit whose output has no gradient."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).argmax(-1)


class Routes(Net):
    """A model in which a unit without gradient decides whether another one is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = GivesNumbers()

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        chosen = nn.functional.one_hot(self.blocks[1](x), WIDTH)
        found: Tensor = self.blocks[2](x * chosen)
        return found


class PassesThrough(Block):
    """A unit that returns its input unchanged, and stores a loss of its weight in an attribute."""

    def forward(self, x: Tensor) -> Any:
        self.aside = super().forward(x).mean()
        return x


class Prompt(nn.Module):
    """A unit that returns a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self) -> Tensor:
        return self.kept[1]


class Prompted(net_of(Prompt)):  # type: ignore[misc]
    def body(self, x: Tensor) -> Tensor:
        prompts = [block() for block in self.blocks]
        for prompt in prompts:
            x = x * prompt + prompt
        return x


def prompts_from_outside(model: Any, batch: Batch) -> None:
    """Use a unit's output outside any forward."""
    first, second = (model.head(sum(model.embed(batch.x) * block() for block in model.blocks)) for _ in range(2))
    (first.square().mean() + second.exp().mean()).backward()


class Auxiliary(Block):
    """A unit that stores a second loss in an attribute."""

    aside: Tensor

    def forward(self, x: Tensor) -> Any:
        self.aside = self.outer.weight.square().mean() + self.norm(x).exp().mean()
        return super().forward(x)


def with_what_is_aside(model: Any, batch: Batch) -> None:
    loss = loss_of(model, batch)
    (loss + sum(block.aside for block in model.blocks)).backward()


# -- edits of outputs -------------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[Tensor], Any]] = {
    name: getattr(torch.Tensor, name) for name in ("relu_", "sigmoid_", "exp_", "tanh_", "neg_", "square_", "abs_")
}
EDITS["add_"] = lambda x: x.add_(1)
EDITS["mul_ by a tensor"] = lambda x: x.mul_(torch.arange(1.0, 1 + WIDTH))
EDITS["a slice"] = lambda x: x[:, 1:3].mul_(2)
EDITS["leaky_relu_"] = lambda x: nn.functional.leaky_relu_(x)
EDITS["elu"] = lambda x: nn.functional.elu(x, inplace=True)
EDITS["index_put_"] = lambda x: x.index_put_((torch.tensor([0]),), torch.zeros(1, WIDTH))


class Edits(Net):
    """A model that edits outputs of units in place."""

    def body(self, x: Tensor) -> Tensor:
        edits = list(EDITS.values())
        for number, block in enumerate(self.blocks):
            x = block(x)
            edits[number](x)
            x = torch.tanh(x)
        return x


class EditsInside(Block):
    """A unit that edits its outputs and inputs in place."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.inner(self.norm(x)).relu_()
        return self.outer(hidden).add_(x).sigmoid_()


CASES: dict[str, Case] = {
    **{f"outputs are {name}": Case(packing(name)) for name in PACKS},
    "outputs are None": Case(TakesResults),
    "outputs are numbers without gradient": Case(Routes),
    "outputs are the input": Case(net_of(PassesThrough), with_what_is_aside),
    "outputs are views of a weight": Case(Prompted),
    "outputs are views of a weight, used outside": Case(Prompted, prompts_from_outside),
    "an auxiliary loss on the module": Case(net_of(Auxiliary), with_what_is_aside),
    "outputs edited in place": Case(type("AllEdits", (Edits,), {"count": len(EDITS)})),
    "edits in place inside": Case(net_of(EditsInside)),
}


@WORLD_SIZES
@pytest.mark.parametrize("name", CASES)
@pytest.mark.full
def test_training_equals_the_plain_loop_and_leaves_nothing_gathered(name: str, world_size: int) -> None:
    check(CASES[name], world_size)
