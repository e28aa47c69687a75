"""States with a value for each block of elements: ranks step pieces of whole blocks, with the plain loop's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support import blockwise
from ..support.blockwise import Blocks, Blockwise
from ..support.errors import error_of
from ..support.parts import parts_of
from ..support.plain import assert_same_model, assert_same_states
from ..support.rows import rows
from .whole import made, on_ranks, train, train_plainly

PIECE = 4096  # elements: pieces begin at multiples of it, and are not shorter


class Net(nn.Module):
    """Matrices of two pieces or more, of which one is frozen, and parameters around the limits of 8-bit classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.frozen = nn.Linear(8, 1408), nn.Linear(1408, 8), nn.Linear(8, 1024)
        self.frozen.weight.requires_grad_(False)
        self.rest = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (4095, 4096, 4097, 4352, 8192, 8448)])

    def forward(self, x: Tensor) -> Tensor:
        rest = sum((p * x.sum()).sin().mean() for p in self.rest)
        return self.last(torch.tanh(self.first(x))) + self.frozen(x).mean() + rest


def made_by(model: nn.Module, transport: Transport, stage: int, cls: Any = Blockwise, **settings: Any) -> ZeroOptimizer:
    settings = {"bucket_cap_mb": 0.06, "partition": "block", **settings}
    return ZeroOptimizer(model, cls, module=model, stage=stage, process_group=transport, **settings)


def plainly(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = made(Net)
    optimizer = Blockwise(plain.parameters())
    train_plainly(plain, optimizer, range(steps))
    return plain, optimizer


@pytest.mark.parametrize(
    ("ranks", "stage", "copies"), rows([(3, 3, 3), (2, 0, 2)], [(1, 2, 1), (5, 1, 5), (4, 2, 2), (6, 3, 6), (6, 3, 3)])
)
def test_pieces_give_the_bits_of_the_plain_loop_and_whole_dicts(ranks: int, stage: int, copies: int) -> None:
    """Also after a dict of the class was loaded. ``copies``: the ranks that share one copy."""
    plain, optimizer = plainly(2)
    begun = optimizer.state_dict()
    begun["state"] = {index: dict(state) for index, state in begun["state"].items()}  # the class's own go on
    train_plainly(plain, optimizer, range(2, 3))

    def run(model: nn.Module, transport: Transport) -> tuple[nn.Module, Any]:
        zeros = made_by(model, transport, stage, sharding_factor=None if copies == ranks else copies)
        train(model, zeros, range(2))
        with pytest.raises(ValueError, match=r"'momentum.codes' of 'first.weight' is that of another number"):
            zeros.load_state_dict({**begun, "state": {0: {"momentum": Blocks.of(torch.zeros(2 * PIECE), True)}}})
        zeros.load_state_dict(begun)
        train(model, zeros, range(2, 3))
        told = zeros.describe()
        for what in ("parameters", "gradients", "optimizer"):
            assert told.formula_bytes[what] == told.bytes[what]
        zeros.consolidate_state_dict(None)
        found = zeros.state_dict()
        zeros.close()
        return model, found

    for model, found in on_ranks(ranks, run, Net):
        assert_same_model(model, plain)
        assert_same_states(found, optimizer.state_dict())


@pytest.mark.parametrize(
    ("before", "after"), rows([((3, 2, 3), (2, 3))], [((4, 1, 2), (3, 0)), ((2, 0, 2), (5, 1)), ((6, 3, 6), (1, 2))])
)
def test_checkpoints_have_whole_states_and_training_goes_on_at_another_number_of_ranks(
    before: tuple[int, int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    """They have the bytes that one rank writes."""

    def begin(model: nn.Module, transport: Transport, stage: int, copies: int) -> None:
        factor = None if copies == transport.world_size else copies
        optimizer = made_by(model, transport, stage, sharding_factor=factor)
        train(model, optimizer, range(2))
        zero.save(tmp_path / f"of {transport.world_size}", optimizer)
        optimizer.close()

    def go_on(model: nn.Module, transport: Transport) -> tuple[nn.Module, Any]:
        optimizer = made_by(model, transport, after[1])
        zero.load(tmp_path / f"of {before[0]}", optimizer, rng=False)
        train(model, optimizer, range(2, 4))
        optimizer.consolidate_state_dict(None)
        found = optimizer.state_dict()
        optimizer.close()
        return model, found

    for ranks, stage, copies in ((1, 0, 1), before):
        on_ranks(ranks, lambda model, transport, s=stage, c=copies: begin(model, transport, s, c), Net)  # type: ignore[misc]
    one, several = (
        {path.name: path.read_bytes() for path in (tmp_path / f"of {ranks}" / "optimizer").iterdir()}
        for ranks in (1, before[0])
    )
    assert one == several
    plain, optimizer = plainly(4)
    for model, states in on_ranks(after[0], go_on, Net):
        assert_same_model(model, plain)
        assert_same_states(states, optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:not restored from")
def test_a_checkpoint_with_blocks_of_another_size_is_refused_or_its_states_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(model: nn.Module, transport: Transport) -> None:
        optimizer = made_by(model, transport, 2)
        train(model, optimizer, range(1))
        zero.save(tmp_path / "saved", optimizer)
        optimizer.close()

    def go_on(model: nn.Module, transport: Transport) -> tuple[str, tuple[str, ...], nn.Module]:
        optimizer = made_by(model, transport, transport.world_size)
        text = error_of(lambda: zero.load(tmp_path / "saved", optimizer))
        restored = zero.load(tmp_path / "saved", optimizer, strict=False, rng=False)
        train(model, optimizer, range(1, 3))
        optimizer.close()
        return text, restored.not_restored, model

    on_ranks(3, begin, Net)
    monkeypatch.setattr(blockwise, "BLOCK", 512)
    ((_, _, alone),) = on_ranks(1, go_on, Net)
    why = "its state 'momentum.scale' has 44 values in the checkpoint, and another number here"
    for text, not_restored, model in on_ranks(3, go_on, Net):
        assert f"'first.weight' has states for blocks of another size: {why}. Build the optimizer with" in text
        assert f"the states of 'first.weight' ({why}: they begin anew)" in not_restored
        assert_same_model(model, alone)


# -- which parameters are cut ------------------------------------------------------------------------------------------


class Limited(Blockwise):
    """Has blocks only in parameters of more than three pieces."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        super().update(p, group)
        momentum = self.state[p]["momentum"]
        if p.numel() <= 3 * PIECE and isinstance(momentum, Blocks):
            self.state[p]["momentum"] = momentum.values()


def cut(cls: Any, shapes: list[tuple[int, ...]], **settings: Any) -> list[bool]:
    """Return which parameters of these shapes are cut; the others have one owner."""
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    optimizer = made_by(model, solo(), 2, cls, **settings)
    found = parts_of(optimizer).storage.layout.parameters
    assert all(spec.blocks is not spec.one_owner for spec in found)
    optimizer.close()
    return [spec.blocks for spec in found]


def test_a_parameter_is_cut_if_each_piece_has_states_of_the_kinds_of_the_whole() -> None:
    """`Blockwise` keeps 8 bits from 4,096 elements on, if they fill blocks of 256."""
    sizes = [4095, 4096, 4097, 4352, 8191, 8192, 8193, 8448, 12288, 12289]
    fills = [size >= 2 * PIECE and size % 256 == 0 for size in sizes]
    assert cut(Blockwise, [(size,) for size in sizes]) == fills
    assert cut(Blockwise, [(64, 128), (64, 129), (4, 4, 8, 128), (7, 1024)]) == [True, False, True, False]
    assert cut(Limited, [(2 * PIECE,), (4 * PIECE,), (2, 2 * PIECE)]) == [True, False, False]
    transposed = nn.Parameter(torch.randn(64, 128).t())
    optimizer = made_by(nn.ParameterList([transposed]), solo(), 2)
    assert [spec.blocks for spec in parts_of(optimizer).storage.layout.parameters] == [False]
    optimizer.close()


class Across(Blockwise):
    """Divides gradients by the norm of all of the parameter's."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        p.grad.div_(p.grad.norm())
        super().update(p, group)


class Neighbours(Blockwise):
    """Has one value for all elements in its state, which nothing uses for a while."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        super().update(p, group)
        assert p.grad is not None
        self.state[p]["most"] = p.grad.abs().max()


class Flat(Blockwise):
    """Has a state of a value for each element, which always is a vector."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        super().update(p, group)
        assert p.grad is not None
        self.state[p]["last"] = p.grad.reshape(-1).clone()


class Rows(Blockwise):
    """Divides blocks of 64 elements of each row by their maximum; a vector is one row."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        for block in p.grad.split(64, dim=-1):
            block.div_(block.abs().amax(-1, keepdim=True).clamp_min(1e-3))
        super().update(p, group)


class Kept:
    pass


class KeepsAnObject(Neighbours):
    """Has an object of its own in its state, which may begin to act after the trial."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        super().update(p, group)
        self.state[p]["most"] = Kept()


def test_a_class_that_looks_across_blocks_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="its state 'last' is as large as the parameter, and has another"):
        cut(Flat, [(64, 4 * 64)])
    with pytest.raises(ValueError, match="Rows cannot be cut between blocks: stepping pieces of a parameter of shape"):
        cut(Rows, [(96, 96)])
    assert cut(Rows, [(64, 128)]) == [True], "its rows consist of whole blocks"
    for cls, reason in (
        (Across, "stepping pieces of a parameter of shape .* gave different bits"),
        (Neighbours, "its state 'most' got another value for pieces than for the whole"),
        (KeepsAnObject, "its state 'most' is a Kept, which cannot be compared"),
    ):
        with pytest.raises(ValueError, match=rf"{cls.__name__} cannot be cut between blocks: {reason}"):
            cut(cls, [(4 * PIECE,)])
        assert cut(cls, [(PIECE,)]) == [False]
    assert cut(torch.optim.AdamW, [(2 * PIECE,)], lr=0.1) == [True], "an element-wise class has blocks of one element"


class Scaled(torch.optim.Optimizer):
    """Divides each block of gradients by its maximum, which it keeps. An option is the size of the blocks."""

    def __init__(self, params: Any, lr: float = 0.05, block: int = 256) -> None:
        super().__init__(params, {"lr": lr, "block": block})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = p.grad.reshape(-1, group["block"] if p.numel() % group["block"] == 0 else p.numel())
                    self.state[p]["most"] = rows.abs().amax(1).clamp_min(1e-3)
                    p.sub_((rows / self.state[p]["most"][:, None]).view_as(p), alpha=group["lr"])


def test_the_blocks_of_a_group_that_was_not_added_are_forgotten() -> None:
    """One rank had a problem, when the other had tried the class."""

    def program(transport: Transport) -> list[str]:
        model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(64, 128))])
        optimizer = ZeroOptimizer([model[0]], Scaled, module=model, process_group=transport, partition="block", stage=1)
        model[1].grad = None if transport.rank else torch.ones(64, 128)
        told = [error_of(optimizer.add_param_group, {"params": [model[1]], "block": 128})]
        model[1].grad = None
        optimizer.add_param_group({"params": [model[1]], "block": 256})
        optimizer.close()
        return told

    for (message,) in on_threads(2, program):
        assert "has a gradient already" in message


def test_blocks_have_one_size_in_all_groups_and_keep_it() -> None:
    """One rule says which values of a state belong to a piece."""
    model = nn.ParameterList([nn.Parameter(torch.randn(64, 128)) for _ in range(3)])
    groups = [{"params": [model[0]], "block": 128}, {"params": [model[1]]}]
    with pytest.raises(ValueError, match="its state 'most' has a value for 128 elements, and for 256 in another"):
        ZeroOptimizer(groups, Scaled, module=model, process_group=solo(), partition="block")
    optimizer = ZeroOptimizer([{"params": [model[1]]}], Scaled, module=model, process_group=solo(), partition="block")
    words = "Scaled cannot be cut between blocks with these options: its state 'most' has a value for 256 elements, and"
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [model[0]], "block": 128})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["block"] = 128
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["block"] == 256
    optimizer.add_param_group({"params": [model[2]]})
    for p in model:
        p.grad = None
    (model[1].sin().sum() + model[2].cos().sum()).backward()
    optimizer.step()
    assert optimizer.state[model[2]]["most"].shape == (32,)
    optimizer.close()
