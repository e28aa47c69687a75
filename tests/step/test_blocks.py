"""States with a value for each block of elements: which parameters are cut between blocks, and how large blocks are."""

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
from ..support.errors import assert_in_order, error_of
from ..support.parts import parts_of
from ..support.plain import assert_same_model
from ..support.sides import OnRank
from ..support.updates import Updates
from .whole import Large, Place, Training, in_pieces, train

PIECE = 4096  # elements: pieces begin at multiples of it, and are not shorter
LARGE = Training(Large, in_pieces, Blockwise)


@pytest.mark.first(0)
@pytest.mark.filterwarnings("ignore:not restored from")
def test_a_checkpoint_with_blocks_of_another_size_is_refused_or_its_states_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(model: nn.Module, optimizer: ZeroOptimizer) -> None:
        train(OnRank(model, optimizer), range(1))
        zero.save(tmp_path / "saved", optimizer)
        optimizer.consolidate_state_dict(None)
        other = {**optimizer.state_dict(), "state": {0: {"momentum": Blocks.of(torch.zeros(2 * PIECE), True)}}}
        words = "'momentum.codes' of 'first.weight' is that of another number"
        assert words in error_of(optimizer.load_state_dict, other)

    def go_on(model: nn.Module, optimizer: ZeroOptimizer) -> Any:
        text = error_of(lambda: zero.load(tmp_path / "saved", optimizer))
        restored = zero.load(tmp_path / "saved", optimizer, strict=False, rng=False)
        train(OnRank(model, optimizer), range(1, 3))
        return text, restored.not_restored, model

    LARGE.on(Place(3, 2), begin)
    monkeypatch.setattr(blockwise, "BLOCK", 512)
    ((_, _, alone),) = LARGE.on(Place(1, 1), go_on)
    why = "its state 'momentum.scale' has 44 values in the checkpoint, and another number here"
    for text, not_restored, model in LARGE.on(Place(3, 3), go_on):
        assert f"'first.weight' has states for blocks of another size: {why}. Build the optimizer with" in text
        assert f"the states of 'first.weight' ({why}: they begin anew)" in not_restored
        assert_same_model(model, alone)


def cut(cls: Any, *parameters: Any, **settings: Any) -> list[bool]:
    """Return which parameters, given or of these shapes, are cut; the others have one owner."""
    model = nn.ParameterList(p if isinstance(p, nn.Parameter) else nn.Parameter(torch.randn(p)) for p in parameters)
    optimizer = ZeroOptimizer(model, cls, process_group=solo(), partition="block", **settings)
    found = parts_of(optimizer).storage.layout.parameters
    assert all(spec.grain.unit in ("block", "parameter") for spec in found)
    optimizer.close()
    return [spec.grain.unit == "block" for spec in found]


def changed(name: str, before: Any = lambda p: None, after: Any = lambda p, state: {}) -> type[Blockwise]:
    """Return a class that calls ``before(p)``, and adds ``after(p, state)`` to the states."""

    def update(self: Any, p: Tensor, group: dict[str, Any]) -> None:
        before(p)
        Blockwise.update(self, p, group)
        self.state[p].update(after(p, self.state[p]))

    return type(name, (Blockwise,), {"update": update})


def not_in_blocks(p: Tensor, state: Any) -> dict[str, Any]:
    momentum = state["momentum"]
    return {"momentum": momentum.values()} if p.numel() <= 3 * PIECE and isinstance(momentum, Blocks) else {}


Limited = changed("Limited", after=not_in_blocks)  # has blocks only in parameters of more than three pieces


def test_a_parameter_is_cut_if_each_piece_has_states_of_the_kinds_of_the_whole() -> None:
    """`Blockwise` keeps 8 bits from 4,096 elements on, if they fill blocks of 256."""
    sizes = [4095, 4096, 4097, 4352, 8191, 8192, 8193, 8448, 12288, 12289]
    fills = [size >= 2 * PIECE and size % 256 == 0 for size in sizes]
    assert cut(Blockwise, *sizes) == fills
    assert cut(Blockwise, (64, 128), (64, 129), (4, 4, 8, 128), (7, 1024)) == [True, False, True, False]
    assert cut(Limited, 2 * PIECE, 4 * PIECE, (2, 2 * PIECE)) == [True, False, False]
    assert cut(Blockwise, nn.Parameter(torch.randn(64, 128).t())) == [False]
    assert cut(torch.optim.AdamW, 2 * PIECE, lr=0.1) == [True], "an element-wise class has blocks of one element"


def divide_rows(p: Any) -> None:
    """Divide blocks of 64 elements of each row by their maximum; a vector is one row."""
    for block in p.grad.split(64, dim=-1):
        block.div_(block.abs().amax(-1, keepdim=True).clamp_min(1e-3))


Rows = changed("Rows", divide_rows)
DIFFERENT = "stepping pieces of a parameter of shape … gave different bits"
ACROSS: list[tuple[type[Blockwise], Any, str]] = [  # class, shape, the reason
    (changed("Flat", after=lambda p, _: {"last": p.grad.reshape(-1).clone()}), (64, 256), "'last' is as large as the"),
    (Rows, (96, 96), DIFFERENT),
    (changed("Across", lambda p: p.grad.div_(p.grad.norm())), 4 * PIECE, DIFFERENT),
    (
        changed("Neighbours", after=lambda p, _: {"most": p.grad.abs().max()}),
        4 * PIECE,
        "its state 'most' got another value for pieces than for the whole",
    ),
    (
        changed("KeepsAnObject", after=lambda *_: {"most": object()}),  # it may begin to act after the trial
        4 * PIECE,
        "its state 'most' is a object, which cannot be compared",
    ),
]


def test_a_class_that_looks_across_blocks_is_refused_with_the_reason() -> None:
    for cls, shape, reason in ACROSS:
        assert_in_order(f"{cls.__name__} cannot be cut between blocks: … {reason}", error_of(cut, cls, shape))
        if shape == 4 * PIECE:
            assert cut(cls, PIECE) == [False]
    assert cut(Rows, (64, 128)) == [True], "its rows consist of whole blocks"


class Scaled(Updates):
    """Divides each block of gradients by its maximum, which it keeps. Options are the size of the blocks, and the
    elements that a parameter with blocks has at least."""

    def __init__(self, params: Any, lr: float = 0.05, block: int = 256, least: int = 0) -> None:
        super().__init__(params, {"lr": lr, "block": block, "least": least})

    def update(self, p: Any, group: dict[str, Any]) -> None:
        if p.numel() < group["least"]:
            p.sub_(p.grad, alpha=group["lr"])
            return
        rows = p.grad.reshape(-1, group["block"] if p.numel() % group["block"] == 0 else p.numel())
        self.state[p]["most"] = rows.abs().amax(1).clamp_min(1e-3)
        p.sub_((rows / self.state[p]["most"][:, None]).view_as(p), alpha=group["lr"])


def of_matrices(count: int, transport: Transport, **first: Any) -> tuple[Any, ZeroOptimizer]:
    """Return matrices of many blocks, and an optimizer of the first ``count``. ``first``: options of the first one."""
    model = nn.ParameterList([nn.Parameter(torch.randn(64, 128)) for _ in range(3)])
    groups = [{"params": [p], **(first if p is model[0] else {})} for p in model[:count]]
    given: dict[str, Any] = {"module": model, "process_group": transport, "partition": "block", "stage": 1}
    return model, ZeroOptimizer(groups, Scaled, **given)


def test_the_blocks_of_a_group_that_was_not_added_are_forgotten() -> None:
    """One rank had a problem, when the other had tried the class."""

    def program(transport: Transport) -> str:
        model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(64, 128))])
        optimizer = ZeroOptimizer([model[0]], Scaled, module=model, process_group=transport, partition="block", stage=1)
        model[1].grad = None if transport.rank else torch.ones(64, 128)
        told = error_of(optimizer.add_param_group, {"params": [model[1]], "block": 128})
        model[1].grad = None
        optimizer.add_param_group({"params": [model[1]], "block": 256})
        optimizer.close()
        return told

    for message in on_threads(2, program):
        assert "has a gradient already" in message


def test_blocks_have_one_size_in_all_groups_and_keep_it() -> None:
    """One rule says which values of a state belong to a piece."""
    other = "its state 'most' has a value for 128 elements, and for 256 in another"
    assert other in error_of(of_matrices, 2, solo(), block=128)
    model, optimizer = of_matrices(1, solo())
    words = "Scaled cannot be cut between blocks with these options: its state 'most' has a value for 256 elements, and"
    assert words in error_of(optimizer.add_param_group, {"params": [model[1]], "block": 128})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["block"] = 128
    assert words in error_of(optimizer.load_state_dict, saved)
    saved["param_groups"][0] |= {"block": 256, "least": 2 * PIECE}
    assert "Scaled steps pieces of '0' otherwise with these options" in error_of(optimizer.load_state_dict, saved)
    assert (optimizer.param_groups[0]["block"], optimizer.param_groups[0]["least"]) == (256, 0)
    optimizer.add_param_group({"params": [model[2]]})
    (model[0].sin().sum() + model[2].cos().sum()).backward()
    optimizer.step()
    assert optimizer.state[model[2]]["most"].shape == (32,)
    optimizer.close()
