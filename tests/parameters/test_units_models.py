"""Models that stage 3 can train: lists of every kind, ties, frozen parts, groups, torch's own layers.

Each case has the plain loop's bits, and afterwards no unit is gathered.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from ..support.cases import INPUTS, OUTPUTS, WIDTH, WORLD_SIZES, Batch, Block, Case, Net, check, loss_of, net_of

# -- tied weights -----------------------------------------------------------------------------------------------------


def tie_two_units(model: Any) -> None:
    model.blocks[2].inner.weight = model.blocks[0].inner.weight


class TiedInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH + 2)
        self.again.weight = self.inner.weight

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.again(x).mean()


# -- parts ------------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """A block of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(), nn.Sequential(Block(), nn.Tanh())])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x) * self.scale
        return x


class Lists(Net):
    """Lists in lists, and a dict in a list."""

    def __init__(self) -> None:
        super().__init__()
        inside = nn.ModuleDict({"a": Block(), "b": Deep()})
        self.blocks = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.Sequential(Block(), Block()), inside])
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(()))])

    def body(self, x: Tensor) -> Tensor:
        lists: Any = self.blocks
        pair, both, named = lists
        x = both(pair[1](pair[0](x))) * self.extra[0]
        found: Tensor = named["b"](named["a"](x)) * self.extra[1]
        return found


class NoList(nn.Module):
    """A model without a list: all parameters are in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(INPUTS, WIDTH), Block(), nn.Linear(WIDTH, OUTPUTS)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block(self.embed(x)) * self.scale)


def sequential() -> nn.Sequential:
    """Build a model whose root unit is empty."""
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), Block(), Block(), nn.Linear(WIDTH, OUTPUTS))


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.LayerNorm))


def share_module_with_root(model: Any) -> None:
    model.blocks[1].norm = model.norm


def share_weight_with_root(model: Any) -> None:
    model.blocks[1].norm.weight = model.norm.weight


def share_module_of_units(model: Any) -> None:
    model.blocks[2].inner = model.blocks[0].inner


# -- frozen, unlisted, groups -----------------------------------------------------------------------------------------


def freeze_unit(model: Any) -> None:
    model.blocks[1].requires_grad_(False)


def freeze_parts(model: Any) -> None:
    for block in model.blocks:
        block.inner.weight.requires_grad_(False)
        block.norm.requires_grad_(False)
    model.head.weight.requires_grad_(False)


def freeze_the_beginning(model: Any) -> None:
    """Freeze the first layers, so that a forward begins without a graph."""
    model.embed.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)


def thaw(model: Any, step: int) -> None:
    model.blocks[1].requires_grad_(step >= 1)


def freeze_later(model: Any, step: int) -> None:
    model.blocks[2].requires_grad_(step != 1)


def half(model: Any) -> list[dict[str, Any]]:
    """Optimize only some parameters."""
    return [{"params": [*model.blocks[0].parameters(), model.blocks[1].inner.weight, *model.head.parameters()]}]


def half_frozen(model: Any) -> None:
    """Freeze the parameters that are not optimized."""
    chosen = {id(p) for p in half(model)[0]["params"]}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)


def floats(model: Any) -> list[nn.Parameter]:
    """Return the parameters of a floating-point dtype, which can be optimized."""
    return [p for p in model.parameters() if p.is_floating_point()]


def groups(model: Any) -> list[dict[str, Any]]:
    """Return groups that each have parameters of several units."""
    plain = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3, "betas": (0.7, 0.9)},
        {"params": plain[::2], "weight_decay": 0.0},
        {"params": plain[1::2], "lr": 0.3, "amsgrad": True},
    ]


class Dtypes(Block):
    """A unit with several dtypes, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.counter = nn.Parameter(torch.tensor([2, 3]), requires_grad=False)
        self.fixed = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        wide = self.wide(x.double()) * self.fixed * self.counter.sum()
        return super().forward(x) + wide.float() + self.narrow(x.bfloat16()).float()


class OddShapes(Block):
    """Parameters with no element, one, a scalar, a prime number of elements, and transposed memory.

    Some are alone in their dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.also_empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.empty_frozen = nn.Parameter(torch.zeros(2, 0), requires_grad=False)
        self.scalar, self.one = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))
        self.prime = nn.Parameter(torch.randn(31))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH + 1).t())
        self.convolution = nn.Conv2d(2, 3, 2)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Any:
        nothing = self.empty.exp().sum() + self.also_empty.square().sum().float() + (x[:0] @ x.t()[:, :1]).sum()
        image = x.new_ones(1, 2, 3, 3).to(memory_format=torch.channels_last) * x.mean()
        wide = self.convolution(image).mean() + self.prime.tanh().sum()
        return super().forward(x) * self.scalar + self.one + nothing + wide + (x @ self.turned.t())[:, :1]


# -- parametrizations --------------------------------------------------------------------------------------------------


def norm_inside(model: Any) -> None:
    weight_norm(model.blocks[1].inner)
    weight_norm(model.head)


def norm_of_units() -> nn.Module:
    first, second = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
    return nn.Sequential(weight_norm(first), nn.Tanh(), weight_norm(second))


def old_norm_inside(model: Any) -> None:
    torch.nn.utils.weight_norm(model.blocks[1].inner)
    torch.nn.utils.weight_norm(model.head)


def old_norm_of_units() -> nn.Module:
    first, second = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
    return nn.Sequential(torch.nn.utils.weight_norm(first), nn.Tanh(), torch.nn.utils.weight_norm(second))


class LowRank(nn.Module):
    """A parametrization with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(OUTPUTS, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def low_rank(model: Any) -> None:
    parametrize.register_parametrization(model.head, "weight", LowRank())
    model.blocks[2].outer = nn.Linear(WIDTH + 2, WIDTH)


# -- torch's own ------------------------------------------------------------------------------------------------------


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return x + super().forward(x, x, x, need_weights=False)[0]


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)[0]


class Transformer(Net):
    """torch's own layers as units; their container reads their weights to choose a code path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)  # type: ignore[assignment]
        for parameter in self.blocks.parameters():
            nn.init.normal_(parameter)

    def body(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks(x[None])[0]
        return found


def evaluated_between(model: nn.Module, batch: Batch) -> None:
    model.eval()
    with torch.no_grad():
        score = model(batch.x).mean()
    model.train()
    (loss_of(model, batch) * score).backward()


def evaluating(model: Any) -> None:
    model.eval()


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.batch.running_mean = torch.randn(WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.batch(super().forward(x)) + self.offset


class Narrowed(Block):
    """A unit that computes in a narrower dtype."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def narrowed(model: nn.Module, batch: Batch) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch.x)
    out.float().square().mean().backward()


class Graph(Block):
    """A layer that saves a sparse tensor."""

    def forward(self, x: Tensor) -> Any:
        neighbours = torch.eye(x.shape[0]).to_sparse()
        return super().forward(x) + torch.sparse.mm(neighbours, self.norm(x))


class Mapped(Block):
    def forward(self, x: Tensor) -> Any:
        return torch.vmap(super().forward)(x)


CASES: dict[str, Case] = {
    "tied across two units": Case(prepared=tie_two_units),
    "tied within a unit": Case(net_of(TiedInside)),
    "blocks of blocks": Case(net_of(Deep)),
    "lists in lists": Case(Lists),
    "no list at all": Case(NoList),
    "the root is a list": Case(sequential),
    "units by a predicate": Case(Lists, units=is_block),
    "units by a predicate, small ones": Case(units=is_layer),
    "units by a predicate, no list": Case(NoList, units=is_block),
    "a module of a unit and of the root": Case(prepared=share_module_with_root),
    "a weight of a unit and of the root": Case(prepared=share_weight_with_root),
    "a module of two units": Case(prepared=share_module_of_units),
    "a frozen unit": Case(prepared=freeze_unit),
    "frozen parts of units": Case(prepared=freeze_parts),
    "a frozen beginning": Case(prepared=freeze_the_beginning),
    "a unit thawed after a step": Case(prepared=freeze_unit, begin=thaw, steps=3),
    "a unit frozen for a step": Case(begin=freeze_later, steps=3),
    "parameters that are not listed": Case(groups=half),
    "parameters that are not listed, frozen": Case(groups=half, prepared=half_frozen),
    "groups across units": Case(groups=groups),
    "several dtypes in a unit": Case(net_of(Dtypes), groups=floats),
    "odd shapes": Case(net_of(OddShapes)),
    "weight norm inside": Case(prepared=norm_inside),
    "weight norm of units": Case(norm_of_units),
    "old weight norm inside": Case(prepared=old_norm_inside),
    "old weight norm of units": Case(old_norm_of_units),
    "a parametrisation with parameters": Case(prepared=low_rank),
    "attention": Case(net_of(Attention)),
    "LSTM": Case(net_of(Recurrent)),
    "TransformerEncoder": Case(Transformer),
    "TransformerEncoder evaluated between": Case(Transformer, evaluated_between),
    "TransformerEncoder in eval mode": Case(Transformer, prepared=evaluating),
    "batch norm in eval mode": Case(net_of(Normed), prepared=evaluating),
    "autocast": Case(run=narrowed),
    "autocast inside": Case(net_of(Narrowed)),
    "sparse tensors": Case(net_of(Graph)),
    "vmap": Case(net_of(Mapped)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@WORLD_SIZES
@pytest.mark.parametrize("name", CASES)
@pytest.mark.full
def test_training_equals_the_plain_loop_and_leaves_nothing_gathered(name: str, world_size: int) -> None:
    check(CASES[name], world_size)
