"""States that are tensor subclasses around others (the 8-bit states of torchao): each parameter has one owner, the bits
are those of the plain loop, and the states are sent, saved and loaded as what their class makes of them."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import CheckpointError, ZeroOptimizer

from ..support.blockwise import Blocks, Blockwise
from ..support.plain import assert_same_model, assert_same_states, plain_step

QUIET = pytest.mark.filterwarnings("ignore:.* is not element-wise")
pytestmark = [pytest.mark.contract, QUIET]

EVERY_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TOGETHER = 6  # micro-batches of a step, shared by the ranks


class Net(nn.Module):
    """Two large matrices, of which one is used in some steps alone, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 8)])
        self.sometimes = nn.Linear(64, 64, bias=False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        return self.layers[2](x + self.sometimes(x) if step % 2 else x)


def loss_of(model: nn.Module, batch: tuple[int, int]) -> Tensor:
    step, number = batch
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + number))
    found: Tensor = model(x, step).square().mean()
    return found


def train(model: nn.Module, optimizer: ZeroOptimizer, transport: Transport, steps: range) -> None:
    for step in steps:
        for number in range(transport.rank, TOGETHER, transport.world_size):
            loss_of(model, (step, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def built(model: nn.Module, transport: Transport, stage: int, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        model, Blockwise, stage=stage, process_group=transport, divisor=TOGETHER, bucket_cap_mb=0.01, **arguments
    )


def plainly(steps: range) -> tuple[Net, Blockwise]:
    model = Net()
    optimizer = Blockwise(model.parameters())
    for step in steps:
        plain_step(model, optimizer, loss_of, [(step, number) for number in range(TOGETHER)], TOGETHER)
        optimizer.zero_grad()
    return model, optimizer


def run(
    transport: Transport, stage: int, steps: range, folder: Path, saved: tuple[Any, Any] | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Train: from the checkpoint in ``folder``, or from ``saved`` weights and states, unless steps begin with 0."""
    model = Net()
    if saved is not None:
        model.load_state_dict(saved[0])
    optimizer = built(model, transport, stage)
    if saved is not None:
        optimizer.load_state_dict(saved[1])
    elif steps.start:
        zero.load(folder / "saved", optimizer, rng=False)
    train(model, optimizer, transport, steps)
    if not steps.start:
        zero.save(folder / "saved", optimizer)
    optimizer.consolidate_state_dict(None)
    states = optimizer.state_dict()
    optimizer.close()
    return model, states


@pytest.mark.parametrize("by", ["checkpoint", "dict", "dict of the class"])
@EVERY_STAGE
@pytest.mark.by_default("0-checkpoint", "1-dict", "2-checkpoint", "3-checkpoint", "3-dict of the class")
def test_they_have_the_bits_of_the_plain_loop_also_after_a_load_elsewhere(stage: int, by: str, tmp_path: Path) -> None:
    plain, stepped = plainly(range(3))
    for model, states in on_threads(2, lambda t: run(t, stage, range(3), tmp_path, None), timeout=20):
        assert_same_model(model, plain)
        assert_same_states(states, stepped.state_dict())
        assert type(states["state"][0]["momentum"]) is Blocks
        assert type(states["state"][1]["momentum"]) is Tensor
        assert states["param_groups"][0]["lr"] == torch.tensor(0.05)
    assert Blockwise(Net().parameters()).load_state_dict(states) is None  # type: ignore[func-returns-value]
    saved = {"dict": (model.state_dict(), states), "dict of the class": (plain.state_dict(), stepped.state_dict())}
    other = partial(run, stage=(stage + 1) % 4, steps=range(3, 6), folder=tmp_path, saved=saved.get(by))
    plain, stepped = plainly(range(6))
    for model, states in on_threads(3, other, timeout=20):
        assert_same_model(model, plain)
        assert_same_states(states, stepped.state_dict())


def test_a_schedule_moves_a_learning_rate_that_the_class_keeps_as_a_tensor() -> None:
    def steps(model: nn.Module, optimizer: Any) -> nn.Module:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            loss_of(model, (step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == torch.tensor(0.01 / 8)
        assert optimizer.param_groups[1]["lr"] == torch.tensor(0.05 / 8)
        return model

    def groups_of(model: nn.Module) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": [first], "lr": 0.01}, {"params": others}]

    plain, model = Net(), Net()
    optimizer = ZeroOptimizer(groups_of(model), Blockwise, module=model, process_group=solo(), partition="parameter")
    steps(model, optimizer)
    optimizer.close()
    assert_same_model(model, steps(plain, Blockwise(groups_of(plain))))


@pytest.mark.parametrize("shape", [(64, 64), (100, 300), (4096,), (1000, 1024)])
def test_ranks_never_step_pieces_of_a_parameter_that_the_class_has_in_blocks(shape: tuple[int, ...]) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape))])
    said = r"its state 'momentum' is a Blocks"
    with pytest.raises(ValueError, match=rf"Blockwise is not element-wise: {said}.* or use \"parameter\""):
        ZeroOptimizer(model, Blockwise, process_group=solo(), partition="element")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZeroOptimizer(model, Blockwise, process_group=solo()).close()
    assert re.search(rf"Blockwise is not element-wise \({said}", str(caught[0].message))


def test_a_checkpoint_of_them_is_read_by_an_optimizer_whose_class_makes_them_and_by_no_other_reader(
    tmp_path: Path,
) -> None:
    model = Net()
    optimizer = built(model, solo(), 2)
    train(model, optimizer, solo(), range(1))
    zero.save(tmp_path / "saved", optimizer)
    optimizer.close()
    found = zero.open_checkpoint(tmp_path / "saved")
    found.verify()
    assert {"momentum.codes", "momentum.scale"} <= found.states()["layers.0.weight"].keys()
    with pytest.raises(CheckpointError, match=r"a saved state is a tests\.blockwise\.Blocks, which is rebuilt by an"):
        found.optimizer_state_dict()

    class Plain(Blockwise):
        __qualname__, __module__ = Blockwise.__qualname__, Blockwise.__module__

        def update(self, p: Tensor, group: dict[str, Any]) -> None:
            self.state[p]["momentum"] = torch.zeros_like(p)

    other = Net()
    optimizer = ZeroOptimizer(other, Plain, process_group=solo(), partition="parameter")
    before = optimizer.check_replicas()
    with pytest.raises(CheckpointError, match=r"a saved state is a tests\.blockwise\.Blocks"):
        zero.load(tmp_path / "saved", optimizer)
    assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)
    optimizer.close()


class OfObjects(Blocks):
    """Its metadata cannot be written."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], object()


class Forgetful(Blocks):
    """It is another one when it is rebuilt."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], facts: Any, size: Any, stride: Any) -> Blocks:
        return Forgetful(inner["codes"], inner["scale"] * 0, *facts[:2], facts[2]["as"])


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (OfObjects, r"its state 'momentum'\['facts'\] is a object: only None, numbers, "),
        (Forgetful, "its state 'momentum' is another one when it is rebuilt by __tensor_unflatten__"),
    ],
)
def test_what_could_not_be_saved_is_refused_at_construction(kept: type[Blocks], said: str) -> None:
    class Keeps(Blockwise):
        pass

    Keeps.kept = kept
    with pytest.raises(
        ValueError, match=rf"Keeps keeps states in tests.*{kept.__name__}, which cannot be saved: {said}"
    ):
        ZeroOptimizer(nn.Linear(64, 64), Keeps, process_group=solo(), partition="parameter")
