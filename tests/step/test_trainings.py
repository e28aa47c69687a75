"""Classes of any kind give the plain loop's weights and states, also where training goes on at other ranks and stages.

Their states have any shape, dtype or subclass, or a value for each block; each param group may have a class of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import solo
from zero import MixedPrecision, Offload, StochasticRounding, ZeroOptimizer
from zero.step.user_optimizer import GROUPS_BESIDE_GATHERS

from ..support.blockwise import Blockwise
from ..support.errors import error_of
from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.rows import rows
from ..support.shampoo import Shampoo
from ..support.sides import OnRank
from .optimizers import ALONE, OPTIONS, Codes, Flagged, Momentum, Net, Ours, Popping, Products, every_second, gram
from .whole import (
    Groups,
    Large,
    Mixed,
    Place,
    Stacks,
    Training,
    assert_goes_on,
    assert_same,
    groups_of,
    in_pieces,
    in_two,
    made,
    of_one_class,
    shared,
    stacks_of,
    train,
    whole,
)

ROUNDING = StochasticRounding(7)
pytestmark = pytest.mark.filterwarnings("ignore:.* is not element-wise")


def wide() -> nn.Module:
    """Return matrices that consist of whole blocks, and vectors: `Blockwise` keeps its states in two ways."""
    return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))


def square() -> nn.Module:
    """Return a single matrix, whose class may keep a state as large as it that is another."""
    return nn.Linear(8, 8, bias=False)


def with_a_class(model: nn.Module) -> Groups:
    """Return groups of which the second has a class with arguments, and the last, which is added, yet another one."""
    matrices, rest = shared(model)
    own = {"optimizer_class": Popping, "layer": "block", **OF_POPPING}
    return [{"params": rest}, {"params": matrices[:2], **own}, {"params": matrices[2:], **OF_SHAMPOO}]


def flagged(model: nn.Module) -> Groups:
    """Return groups of which the first has a class with an option that it wants."""
    matrices, rest = shared(model)
    return [{"params": matrices, "matrices": True, "optimizer_class": Flagged}, {"params": rest}]


def with_our_names(model: nn.Module) -> Groups:
    """The library's partition of a group is beside the class's option of that name."""
    matrices, rest = shared(model)
    return [{"params": matrices, "stage": 2.5, "partition": "parameter"}, {"params": rest}]


def in_blocks(cls: Any = torch.optim.Muon, sizes: Any = (16, 8, 8), precision: str = "") -> Training:
    """Return a training of stacks, of which the last group is added."""
    numbers = {"precision": PRECISIONS.get(precision)}
    return Training(Stacks, lambda model: stacks_of(model, cls, list(sizes)), added=1, **numbers)


class Matrices(nn.Module):
    """Stacks of odd matrices: owners change where a block begins at a multiple of 64 bytes."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7, 3, 5), (9, 17, 19), (16, 5, 7), (6, 16, 16)]
        self.of = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return sum((p.sin() * (n + x.sum())).sum() for n, p in enumerate(self.of))  # type: ignore[return-value]


def rounded(build: Any, groups: Any, cls: Any, counted: bool = True, **options: Any) -> Training:
    """Return a training with stochastic rounding, of which a group is added."""
    added = len(groups(build())) - 1
    return Training(lambda: build().bfloat16(), groups, cls, options, added=added, counted=counted, rounding=ROUNDING)


OF_POPPING: dict[str, Any] = {"lr": 0.1, "factor": 0.5}
OF_SHAMPOO = {"optimizer_class": Shampoo, "partition": "parameter"}
MOMENTUM = {"lr": 1e-3, "momentum": 0.9}
POPPING = Training(Mixed, with_a_class, torch.optim.SGD, MOMENTUM, {Popping: OF_POPPING}, added=1, counted=False)
FLAGGED = Training(Mixed, flagged, torch.optim.Adagrad, {"lr": 0.03})
CODES = Training(Mixed, whole, Codes, counted=False)
PIECES = Training(Large, in_pieces, Blockwise)
ALIGNED = Training(Matrices, lambda model: of_one_class(model, blocks=0), Products)
ADAGRAD = rounded(Mixed, in_two, torch.optim.Adagrad, initial_accumulator_value=0.1)
MUON, ADAFACTOR, ADAMW = in_blocks(), in_blocks(torch.optim.Adafactor, (16, 16)), in_blocks(torch.optim.AdamW)
OURS = Training(Mixed, with_our_names, Ours, {"stage": 3.5, "partition": 0.25, "divisor": 1.5, "units": 0.75})
P = Place
ROWS: dict[str, tuple[Training, Place, Place, str]] = {
    "states in 8 bits": (CODES, P(2, 0), P(1, 1), "checkpoint"),
    "subclasses": (Training(wide, whole, Blockwise), P(1, 2), P(2, 3), "of the class"),
    "pieces of blocks": (PIECES, P(3, 2), P(2, 3), "checkpoint"),
    "two classes": (Training(Mixed, groups_of), P(1, 2), P(2, 0), "of the class"),
    "blocks": (MUON, P(3, 3), P(2, 2), "dict"),
    "blocks in bf16": (in_blocks(precision="bf16"), P(2, 2), P(3, 3), "checkpoint"),
    "blocks, states of each": (ADAFACTOR, P(2, 1, {"bucket_cap_mb": 25.0}), P(3, 3), "checkpoint"),
    "blocks, aligned": (ALIGNED, P(2, 2), P(3, 1), "dict"),
    "rounded, states of an added group": (ADAGRAD, P(2, 1), P(3, 3), "checkpoint"),
    "rounded, every second": (
        rounded(Mixed, of_one_class, Momentum, False, kept=every_second),
        P(2, 1),
        P(3, 3),
        "dict",
    ),
    "rounded, all are square": (rounded(square, whole, Momentum, False, kept=gram), P(1, 2), P(2, 3), "dict"),
    "masters of an added group": (
        Training(lambda: Mixed().double(), in_two, torch.optim.RAdam, added=1, precision=PRECISIONS["bf16"]),
        *(P(2, 3), P(3, 1), "checkpoint"),
    ),
    "arguments of a class": (POPPING, P(3, 3), P(2, 1), "checkpoint"),
    "a wanted option of a group": (FLAGGED, P(3, 2), P(2, 1), "checkpoint"),
    "names of ours": (OURS, P(3, 3), P(2, 0), "checkpoint"),
    "by parameter": (Training(Net, whole, ALONE["Centralized"], OPTIONS, counted=False), P(2, 3), P(3, 1), "dict"),
}


@pytest.mark.first(4)
@pytest.mark.parametrize("row", ROWS)
def test_training_goes_on_as_in_the_plain_loop(row: str, tmp_path: Path) -> None:
    assert_goes_on(*ROWS[row], tmp_path)


def test_a_state_that_cannot_be_sent_is_named_on_every_rank() -> None:
    def run(model: nn.Module, optimizer: ZeroOptimizer) -> str:
        train(OnRank(model, optimizer))
        assert f"by parameter: {len(list(model.parameters()))} parameters" in str(optimizer.describe())
        return error_of(optimizer.consolidate_state_dict)

    for message in Training(Net, whole, ALONE["OwnObjects"], OPTIONS, counted=False).on(P(2, 3), run):
        assert "['keeper'] is a Keeper" in message


# -- on accelerators, where a class steps the buckets of a group in one call -------------------------------------------

SMALL = {"bucket_cap_mb": 0.0002}


class Counted(torch.optim.AdamW):
    """It counts its steps, as a class may for its own use."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


def of_two_classes(model: nn.Module) -> list[dict[str, Any]]:
    matrices, rest = shared(model)
    return [
        {"params": matrices[:3], "lr": 0.01},
        {"params": rest, "optimizer_class": torch.optim.SGD, "momentum": 0.9},
        {"params": matrices[3:], "lr": 0.02, "weight_decay": 0.1},
    ]


def instances_of(optimizer: ZeroOptimizer) -> list[Any]:
    """Return the optimizer of torch that steps each bucket."""
    return [
        bucket.states.instance for bucket in parts_of(optimizer).storage.buckets if not bucket.specs[0].optimizer_class
    ]


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("stage", rows([1, 3], [0, 2]))
def test_a_class_steps_a_group_of_buckets_in_one_call_with_the_bits_of_the_plain_loop(stage: int) -> None:
    training = Training(Mixed, of_two_classes, Counted)
    plain = training.plain()
    train(plain)

    def run(model: nn.Module, optimizer: ZeroOptimizer) -> Any:
        train(OnRank(model, optimizer))
        optimizer.consolidate_state_dict(None)
        return (model, optimizer.state_dict()), instances_of(optimizer)

    calls = GROUPS_BESIDE_GATHERS if stage in (1, 2) else 1
    for found, instances in training.on(Place(2, stage, SMALL), run):
        assert_same([found], plain)
        assert len(instances) > GROUPS_BESIDE_GATHERS
        assert [instance.steps for instance in dict.fromkeys(instances)] == [3] * calls


@pytest.mark.usefixtures("launched")
def test_buckets_of_offloaded_states_or_widened_gradients_are_stepped_one_by_one(tmp_path: Path) -> None:
    narrow = MixedPrecision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
    for given in ({"offload": Offload(tmp_path)}, {"mixed_precision": narrow}):
        arguments: dict[str, Any] = {"process_group": solo(), **SMALL, **given}
        optimizer = ZeroOptimizer(made(Mixed), torch.optim.AdamW, **arguments)
        assert len(set(instances_of(optimizer))) == len(instances_of(optimizer)) > 1
        optimizer.close()
