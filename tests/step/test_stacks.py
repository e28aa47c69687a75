"""Blocks of a stack have owners of their own: their states, their alignment, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import solo
from zero import ZeroOptimizer

from ..support.blockwise import Blockwise
from ..support.errors import assert_in_order, error_of
from ..support.plain import assert_same_model
from ..support.updates import WithRate
from .optimizers import Products
from .whole import QKV


def fused(blocks: Any, cls: Any = torch.optim.AdamW) -> tuple[nn.Module, ZeroOptimizer]:
    """Return a model of one fused matrix after two steps, and its optimizer. ``blocks`` None: the group has none."""
    model = nn.ParameterList([nn.Parameter(torch.linspace(-1, 1, 512).view(32, 16))])
    group: dict[str, Any] = {"params": list(model.named_parameters()), "partition": "parameter"}
    if blocks is not None:
        group["blocks"] = blocks
    optimizer = ZeroOptimizer([group], cls, module=model, stage=2, process_group=solo(), lr=0.1)
    step(model, optimizer, 2)
    return model, optimizer


def step(model: nn.Module, optimizer: ZeroOptimizer, count: int = 1) -> None:
    for number in range(count):
        (model[0] * torch.linspace(1, 2, 512).view(32, 16) * (number + 1)).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded(saved: Any, blocks: Any, cls: Any) -> dict[str, Any]:
    """Assert that a training goes on from a dict of one with other blocks. Return the dict."""
    model, optimizer = fused(saved, cls)
    optimizer.consolidate_state_dict()
    state_dict, weights = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
    step(model, optimizer)
    other, again = fused(blocks, cls)
    other.load_state_dict(weights)
    again.load_state_dict(state_dict)
    step(other, again)
    assert_same_model(other, model)
    return state_dict


def test_a_dict_is_loaded_where_its_states_have_the_form_of_those_of_blocks_or_refused() -> None:
    """In both directions. A state that depends on the size of a block is that of each block after a load."""
    for cls, blocks in ((torch.optim.AdamW, QKV), (torch.optim.Muon, [32])):
        loaded(None, blocks, cls)
        loaded(blocks, None, cls)
    assert loaded(QKV, QKV, Sized)["state"][0]["rows"].tolist() == [float(size) for size in QKV]
    _, optimizer = fused(None, torch.optim.Adafactor)
    optimizer.consolidate_state_dict()
    words = "'row_var' of '0' is that of another number of blocks than 2: … blocks="
    assert_in_order(words, error_of(fused([16, 16], torch.optim.Adafactor)[1].load_state_dict, optimizer.state_dict()))


def test_live_states_have_a_value_for_each_block_that_is_here_and_can_be_reset() -> None:
    model, optimizer = fused([16, 16], torch.optim.Adafactor)
    state = optimizer.state[model[0]]
    assert [value.shape for value in state["row_var"]] == [(16, 1)] * 2
    assert [float(value) for value in state["step"]] == [2.0, 2.0]
    optimizer.offload()
    optimizer.reload()
    told = optimizer.describe()
    assert told.bytes["optimizer"] == told.formula_bytes["optimizer"]
    optimizer.reset_states(model[0])
    assert not optimizer.state[model[0]]
    step(model, optimizer)
    assert [float(value) for value in optimizer.state[model[0]]["step"]] == [1.0, 1.0]
    model, optimizer = fused(QKV)
    assert optimizer.state[model[0]]["exp_avg"].shape == (32, 16)


class Lists(Products):
    """Keeps a list in the state of each matrix, which depends on its values."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        super().update(p, group)
        self.state[p].update(self.kept(p))

    def kept(self, p: Any) -> dict[str, Any]:
        return {"norms": [p.detach().norm().item()]}


def keeping(name: str, kept: Any) -> type[Lists]:
    """Return a class that adds ``kept(p, state)`` to the state of each block after its step."""
    return type(name, (Lists,), {"kept": lambda self, p: kept(p, self.state[p])})


Left = keeping("Left", lambda p, _: {"left": p.grad @ p.grad.T})  # of the shape of a square block
Right = keeping("Right", lambda p, _: {"right": p.grad.T @ p.grad})
Larger = keeping("Larger", lambda p, _: {"many" if p.numel() >= 4096 else "few": p.detach().clone()})
Norm = keeping("Norm", lambda p, state: {"norm": state.get("norm", torch.zeros(())) + p.grad.norm()})


class Sized(WithRate):
    """Keeps a state that depends on a block's shape alone."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad / self.state[p].setdefault("rows", self.rows(p)), alpha=group["lr"])

    def rows(self, p: Tensor) -> Any:
        return torch.tensor(float(len(p)))


SizedByNumber = type("SizedByNumber", (Sized,), {"rows": lambda _, p: float(len(p))})
Columns = type("Columns", (Sized,), {"rows": lambda _, p: p.grad.sum(0)})


def test_a_checkpoint_has_the_blocks_and_their_states_are_not_those_of_others(tmp_path: Path) -> None:
    for cls, before, name in ((Sized, [24, 8], "rows"), (Left, [16, 16], "left")):
        model, optimizer = fused(before, cls)
        zero.save(tmp_path / name, optimizer)
        step(model, optimizer)
        other, again = fused(tuple(before), cls)
        zero.load(tmp_path / name, again, rng=False)
        assert "optimizer_blocks" not in again.param_groups[0]
        step(other, again)
        assert_same_model(other, model)
        why = f"in the checkpoint its state '{name}' has a value for each block of blocks=[{before[0]}, {before[1]}]"
        for blocks in ([8, 24] if cls is Sized else [8] * 4, None):
            other, again = fused(blocks, cls)
            error = error_of(zero.load, tmp_path / name, again, rng=False)
            assert f"'0' has states for blocks of another size: {why}" in error
            with pytest.warns(RuntimeWarning) as warned:
                zero.load(tmp_path / name, again, rng=False, strict=False)
            assert any(f"'0' ({why}: they begin anew" in str(warning.message) for warning in warned)
            assert not again.state[other[0]]


def test_states_of_blocks_begin_anew_where_rows_were_added(tmp_path: Path) -> None:
    _, optimizer = fused([32], Norm)
    zero.save(tmp_path / "saved", optimizer)
    model = nn.ParameterList([nn.Parameter(torch.ones(64, 16))])
    again = ZeroOptimizer([{"params": list(model.named_parameters()), "blocks": [32, 32]}], Norm, process_group=solo())
    with pytest.warns(RuntimeWarning, match=r"'0' \(its states do not have its rows: they begin anew"):
        zero.load(tmp_path / "saved", again, rng=False, resize=lambda *_: True, strict=False)
    assert not again.state[model[0]]


MATRIX = (4, 6)
NO_BLOCKS = "blocks= must be a dimension or a list of sizes, not"
CUTS = "with partition='block': each block has one owner, and this partition cuts them"
REFUSED: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    ((5, 6), {"blocks": [2, 2]}, "'0' of param group 0, … has 5 rows, and the sizes … add up to 4"),
    ((6,), {"blocks": 0}, "'0' of param group 0, … has shape (6,), and is no stack of matrices: put"),
    ((0, 4, 4), {"blocks": 0}, "has shape (0, 4, 4), and is no stack"),
    (MATRIX, {"blocks": 1}, "has shape (4, 6): blocks= must be one of its first 1 dimensions"),
    ((2, 4, 6), {"blocks": 1}, "so the indices of dimension 1 do not … movedim(1, 0) … blocks=0"),
    *[(MATRIX, {"blocks": each}, f"{NO_BLOCKS} {each!r}") for each in ("rows", True, [5, -1])],
    (MATRIX, {"blocks": [2, 2], "partition": "element"}, "with partition='element' … \"parameter\""),
    (MATRIX, {"blocks": [2, 2], "partition": "block"}, CUTS),
    (MATRIX, {"blocks": 0, "optimizer_class": torch.optim.Muon}, "Muon … 2D"),
    ((128, 64), {"blocks": [64, 64], "optimizer_class": Blockwise}, "own 'momentum', a Blocks that"),
    (MATRIX, {"blocks": [3, 1], "optimizer_class": SizedByNumber}, "has its own 'rows', a float that is"),
    (MATRIX, {"blocks": [1] * 4, "optimizer_class": Columns}, "own 'rows', which together have the"),
    (MATRIX, {"blocks": [2, 2], "optimizer_class": Lists}, "Lists … of '0': … own 'norms', a list that"),
    ((32, 16), {"blocks": QKV, "optimizer_class": Left}, "own 'left', of another shape each, and"),
    ((32, 16), {"blocks": [8, 8, 16], "optimizer_class": Right}, "own 'right', of another shape each"),
    ((96, 128), {"blocks": [16, 16, 64], "optimizer_class": Larger}, "other sizes have states of other"),
]


def test_what_has_no_blocks_is_refused_with_the_remedy() -> None:
    turned = nn.Parameter(torch.randn(4, 6, 3).transpose(1, 2))
    of_muon = {"blocks": 0, "optimizer_class": torch.optim.Muon}
    rows = [(nn.Parameter(torch.randn(shape)), group, words) for shape, group, words in REFUSED]
    for parameter, group, words in [*rows, (turned, of_muon, "is not row-major, … make it .contiguous()")]:
        model = nn.ParameterList([parameter])
        groups = [{"params": list(model.named_parameters()), **group}]
        assert_in_order(words, error_of(ZeroOptimizer, groups, torch.optim.AdamW, process_group=solo()))
