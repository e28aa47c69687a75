"""Blocks of a stack have owners of their own, and a class steps each by its shape, with the bits of the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero
from collectives import Transport, solo
from zero import ShardedAverage, ZeroOptimizer

from ..support.blockwise import Blockwise
from ..support.errors import error_of
from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_model, assert_same_value
from ..support.rows import rows
from .stacked import QKV, Stacks, groups_of, plain_of, train
from .whole import made, on_ranks


def optimizer_over(model: nn.Module, transport: Transport, stage: int, **settings: Any) -> ZeroOptimizer:
    options = {key: settings.pop(key) for key in ("cls", "sizes") if key in settings}
    settings = {"bucket_cap_mb": 0.01, **settings}
    groups = groups_of(model, **options)
    return ZeroOptimizer(groups, torch.optim.AdamW, module=model, stage=stage, process_group=transport, **settings)


def states_of(optimizer: ZeroOptimizer) -> dict[str, Any]:
    optimizer.consolidate_state_dict(None)
    found = optimizer.state_dict()
    by_class = found if "state" not in found else {"torch.optim.adamw.AdamW": found}
    return {name: of_class["state"] for name, of_class in by_class.items()}


ROWS = rows(  # ranks, stage, micro-batches of a step, precision, class, further arguments
    [
        (3, 3, 6, None, torch.optim.Muon, {}),
        (4, 2, 4, "bf16", torch.optim.Muon, {}),
        (2, 1, 6, None, torch.optim.Adafactor, {"bucket_cap_mb": 25.0}),
    ],
    [
        (1, 2, 6, None, torch.optim.Muon, {}),
        (2, 0, 6, "bf16, added up in bf16", torch.optim.Muon, {}),
        (5, 3, 5, "bf16", torch.optim.Adafactor, {}),
        (6, 3, 6, None, torch.optim.AdamW, {}),
        (6, 1, 6, None, torch.optim.Muon, {"sharding_factor": 3}),
        (4, 3, 4, None, torch.optim.Muon, {"sharding_factor": 2, "collective": "pairwise"}),
    ],
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, (*row[:4], row[4].__name__))))
def test_each_block_is_stepped_as_in_the_plain_loop_over_blocks(row: Any) -> None:
    """Parameters, states and averages; and the bytes of a rank are those of the formulas."""
    ranks, stage, count, precision, cls, settings = row
    precision = None if precision is None else PRECISIONS[precision]
    options = {"cls": cls, "sizes": [16, 16] if cls is torch.optim.Adafactor else QKV}
    plain = plain_of(made(Stacks), count, precision, **options)
    for step in range(3):
        train(plain, range(step, step + 1), count)
        if step == 0:
            average = AveragedModel(nn.ParameterList(wide.detach() for wide in plain.numbers.updated))
            average.multi_avg_fn = get_ema_multi_avg_fn(0.9)
        average.update_parameters(nn.ParameterList(wide.detach() for wide in plain.numbers.updated))

    def run(model: nn.Module, transport: Transport) -> Any:
        optimizer = optimizer_over(model, transport, stage, mixed_precision=precision, **options, **settings)
        mean = ShardedAverage(optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            train(optimizer, range(step, step + 1), count)
            mean.update_parameters(model)
        told = optimizer.describe()
        for what in ("parameters", "gradients", "optimizer"):
            assert told.formula_bytes[what] == told.bytes[what], what
        averages = mean.gather()
        found = model, states_of(optimizer), averages
        optimizer.close()
        return found

    for model, states, averages in on_ranks(ranks, run, Stacks):
        assert_same_model(model, plain.model)
        assert_same_value(states, plain.optimizer.states(), "states")
        for (name, p), theirs in zip(model.named_parameters(), average.parameters(), strict=True):
            if averages and p.requires_grad:
                assert_same_bits(averages[name], theirs, name)


# -- dicts and checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), rows([((3, 2), (2, 3))], [((4, 1), (6, 2)), ((2, 0), (3, 3)), ((6, 3), (1, 2))])
)
def test_checkpoints_have_whole_states_and_training_goes_on_at_another_number_of_ranks(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    """They have the bytes that one rank writes. Adafactor has states of each block, Muon as large as a block."""
    for cls, sizes in ((torch.optim.Muon, QKV), (torch.optim.Adafactor, [16, 16])):

        def begin(model: nn.Module, transport: Transport, stage: int, options: Any) -> None:
            optimizer = optimizer_over(model, transport, stage, **options)
            train(optimizer, range(2), 12)
            zero.save(tmp_path / f"{options['cls'].__name__} {transport.world_size}", optimizer)
            optimizer.close()

        def go_on(model: nn.Module, transport: Transport, options: Any) -> Any:
            optimizer = optimizer_over(model, transport, after[1], **options)
            zero.load(tmp_path / f"{options['cls'].__name__} {before[0]}", optimizer, rng=False)
            train(optimizer, range(2, 4), 12)
            found = model, states_of(optimizer)
            optimizer.close()
            return found

        options = {"cls": cls, "sizes": sizes}
        for ranks, stage in ((1, 0), before):
            on_ranks(ranks, lambda model, transport, s=stage, o=options: begin(model, transport, s, o), Stacks)  # type: ignore[misc]
        one, several = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{cls.__name__} {ranks}" / "optimizer").iterdir()}
            for ranks in (1, before[0])
        )
        assert one == several
        plain = plain_of(made(Stacks), 12, **options)
        train(plain, range(4), 12)
        for model, states in on_ranks(after[0], lambda model, group, o=options: go_on(model, group, o), Stacks):  # type: ignore[misc]
            assert_same_model(model, plain.model)
            assert_same_value(states, plain.optimizer.states(), "states")


def fused(blocks: Any, cls: Any = torch.optim.AdamW) -> tuple[nn.Module, ZeroOptimizer]:
    """Return a model of one fused matrix after two steps, and its optimizer. ``blocks`` None: the group has none."""
    model = nn.ParameterList([nn.Parameter(torch.linspace(-1, 1, 512).view(32, 16))])
    group: dict[str, Any] = {"params": list(model.named_parameters()), "partition": "parameter"}
    if blocks is not None:
        group["blocks"] = blocks
    optimizer = ZeroOptimizer([group], cls, module=model, stage=2, process_group=solo(), lr=0.1)
    step(model, optimizer, 2)
    return model, optimizer


def step(model: nn.Module, optimizer: ZeroOptimizer, count: int) -> None:
    for number in range(count):
        (model[0] * torch.linspace(1, 2, 512).view(32, 16) * (number + 1)).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_dict_without_blocks_is_loaded_or_refused() -> None:
    """Loaded where its states have the form of those of blocks, in both directions."""
    for cls, blocks in ((torch.optim.AdamW, QKV), (torch.optim.Muon, [32])):
        for saved, loaded in ((None, blocks), (blocks, None)):
            model, optimizer = fused(saved, cls)
            optimizer.consolidate_state_dict()
            state_dict, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            step(model, optimizer, 1)
            other, again = fused(loaded, cls)
            other.load_state_dict(weights)
            again.load_state_dict(state_dict)
            step(other, again, 1)
            assert_same_model(other, model)
    _, optimizer = fused(None, torch.optim.Adafactor)
    optimizer.consolidate_state_dict()
    with pytest.raises(ValueError, match=r"'row_var' of '0' is that of another number of blocks than 2: .* blocks="):
        fused([16, 16], torch.optim.Adafactor)[1].load_state_dict(optimizer.state_dict())


def test_live_states_have_a_value_for_each_block_that_is_here_and_can_be_reset() -> None:
    model, optimizer = fused([16, 16], torch.optim.Adafactor)
    state = optimizer.state[model[0]]
    assert [value.shape for value in state["row_var"]] == [(16, 1)] * 2
    assert [float(value) for value in state["step"]] == [2.0, 2.0]
    optimizer.reset_states(model[0])
    assert not optimizer.state[model[0]]
    step(model, optimizer, 1)
    assert [float(value) for value in optimizer.state[model[0]]["step"]] == [1.0, 1.0]
    model, optimizer = fused(QKV)
    assert optimizer.state[model[0]]["exp_avg"].shape == (32, 16)


# -- which blocks there are --------------------------------------------------------------------------------------------


class Products(torch.optim.Optimizer):
    """Multiplies gradients and parameters where they lie, so that bits may depend on their alignment."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad @ (p.grad.T @ p.grad).tanh() + p @ (p.T @ p.grad), alpha=group["lr"])


@pytest.mark.parametrize("shape", [(7, 3, 5), (9, 17, 19), (16, 5, 7), (6, 16, 16)], ids=str)
def test_a_block_is_aligned_on_its_owner_as_in_the_parameter(shape: tuple[int, ...]) -> None:
    """Owners change where a block begins at a multiple of 64 bytes; other blocks stay with the one before."""

    def built() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(shape)) for _ in range(2)])

    def loss(model: nn.Module) -> Tensor:
        return sum((p.sin() * (n + 1)).sum() for n, p in enumerate(model))  # type: ignore[return-value]

    plain = made(built)
    views = [[block.requires_grad_() for block in p.detach().unbind()] for p in plain]
    optimizer = Products([block for blocks in views for block in blocks])
    for _ in range(2):
        loss(plain).backward()
        for p, blocks in zip(plain, views, strict=True):
            for block, gradient in zip(blocks, p.grad.unbind(), strict=True):
                block.grad = gradient
        optimizer.step()
        plain.zero_grad()

    def run(model: nn.Module, transport: Transport) -> Any:
        groups = [{"params": list(model.parameters()), "blocks": 0}]
        ours = ZeroOptimizer(groups, Products, module=model, stage=2, process_group=transport)
        (bucket,) = parts_of(ours).storage.layout.buckets
        for _ in range(2):
            loss(model).div(transport.world_size).backward()
            ours.divisor = 1
            ours.step()
            ours.zero_grad()
        ours.close()
        return model, [bound % (shape[1] * shape[2]) for bound in bucket.cuts if bound < bucket.slots[0].end]

    for model, offsets in on_ranks(2, run, built):
        assert_same_model(model, plain)
        assert not any(offsets)


class Lists(Products):
    """Keeps a list in the state of each matrix, which depends on its values."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].update(self.kept(p))

    def kept(self, p: Tensor) -> dict[str, Any]:
        return {"norms": [p.detach().norm().item()]}


class Left(Lists):
    """Keeps a square matrix of as many rows, which has the shape of a square block."""

    def kept(self, p: Tensor) -> dict[str, Any]:
        return {"left": p.grad @ p.grad.T}  # type: ignore[union-attr]


class Right(Lists):
    """Keeps a square matrix of as many columns."""

    def kept(self, p: Tensor) -> dict[str, Any]:
        return {"right": p.grad.T @ p.grad}  # type: ignore[union-attr]


class Larger(Lists):
    """Has another state for large blocks."""

    def kept(self, p: Tensor) -> dict[str, Any]:
        return {"many" if p.numel() >= 4096 else "few": p.detach().clone()}


class Norm(Lists):
    """Keeps a single value, which depends on that of the step before."""

    def kept(self, p: Tensor) -> dict[str, Any]:
        return {"norm": self.state[p].get("norm", torch.zeros(())) + p.grad.norm()}  # type: ignore[union-attr]


class Sized(torch.optim.Optimizer):
    """Keeps a state that depends on a block's shape alone."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = self.state[p].setdefault("rows", self.rows(p))
                    p.sub_(p.grad / rows, alpha=group["lr"])

    def rows(self, p: Tensor) -> Any:
        return torch.tensor(float(len(p)))


class SizedByNumber(Sized):
    """Keeps it as a number."""

    def rows(self, p: Tensor) -> Any:
        return float(len(p))


class Columns(Sized):
    """Keeps the sums of columns."""

    def rows(self, p: Tensor) -> Any:
        return p.grad.sum(0)


def test_a_state_that_depends_on_the_size_of_a_block_is_that_of_each_block_after_a_load() -> None:
    model, optimizer = fused(QKV, Sized)
    optimizer.consolidate_state_dict()
    state_dict, weights = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
    assert state_dict["state"][0]["rows"].tolist() == [float(size) for size in QKV]
    step(model, optimizer, 1)
    other, again = fused(QKV, Sized)
    other.load_state_dict(weights)
    again.load_state_dict(state_dict)
    step(other, again, 1)
    assert_same_model(other, model)


def test_a_checkpoint_has_the_blocks_and_their_states_are_not_those_of_others(tmp_path: Path) -> None:
    """Also of as many blocks of other sizes, whose states have the same shapes."""
    for cls, before, name in ((Sized, [24, 8], "rows"), (Left, [16, 16], "left")):
        model, optimizer = fused(before, cls)
        zero.save(tmp_path / name, optimizer)
        step(model, optimizer, 1)
        other, again = fused(tuple(before), cls)
        zero.load(tmp_path / name, again, rng=False)
        assert "optimizer_blocks" not in again.param_groups[0]
        step(other, again, 1)
        assert_same_model(other, model)
        why = rf"in the checkpoint its state '{name}' has a value for each block of blocks=\[{before[0]}, {before[1]}\]"
        for blocks in ([8, 24] if cls is Sized else [8] * 4, None):
            other, again = fused(blocks, cls)
            with pytest.raises(ValueError, match=f"'0' has states for blocks of another size: {why}"):
                zero.load(tmp_path / name, again, rng=False)
            with pytest.warns(RuntimeWarning, match=rf"'0' \({why}: they begin anew"):
                zero.load(tmp_path / name, again, rng=False, strict=False)
            assert not again.state[other[0]]


def test_states_of_blocks_begin_anew_where_rows_were_added(tmp_path: Path) -> None:
    """Also those of a single block, which are one value."""
    _, optimizer = fused([32], Norm)
    zero.save(tmp_path / "saved", optimizer)
    model = nn.ParameterList([nn.Parameter(torch.ones(64, 16))])
    again = ZeroOptimizer([{"params": list(model.named_parameters()), "blocks": [32, 32]}], Norm, process_group=solo())
    with pytest.warns(RuntimeWarning, match=r"'0' \(its states do not have its rows: they begin anew"):
        zero.load(tmp_path / "saved", again, rng=False, resize=lambda *_: True, strict=False)
    assert not again.state[model[0]]


def test_bytes_are_those_of_the_formulas_after_the_states_were_on_the_host() -> None:
    _, optimizer = fused([16, 16], torch.optim.Adafactor)
    optimizer.offload()
    optimizer.reload()
    told = optimizer.describe()
    assert told.bytes["optimizer"] == told.formula_bytes["optimizer"]


MATRIX = (4, 6)
REFUSED: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "sizes": ((5, 6), {"blocks": [2, 2]}, r"'0' of param group 0, .* has 5 rows, and the sizes .* add up to 4"),
    "vector": ((6,), {"blocks": 0}, r"'0' of param group 0, .* has shape \(6,\), and is no stack of matrices: put"),
    "empty": ((0, 4, 4), {"blocks": 0}, r"has shape \(0, 4, 4\), and is no stack"),
    "last": (MATRIX, {"blocks": 1}, r"has shape \(4, 6\): blocks= must be one of its first 1 dimensions"),
    "later": ((2, 4, 6), {"blocks": 1}, r"so the indices of dimension 1 do not .*movedim\(1, 0\).*blocks=0"),
    "words": (MATRIX, {"blocks": "rows"}, r"blocks= must be a dimension or a list of sizes, not 'rows', as in"),
    "true": (MATRIX, {"blocks": True}, r"blocks= must be a dimension or a list of sizes, not True"),
    "negative": (MATRIX, {"blocks": [5, -1]}, r"blocks= must be a dimension or a list of sizes, not \[5, -1\]"),
    "by element": (MATRIX, {"blocks": [2, 2], "partition": "element"}, r'with partition=.element.*"parameter"'),
    "by block": (
        MATRIX,
        {"blocks": [2, 2], "partition": "block"},
        "with partition='block': each block has one owner, and this partition cuts them",
    ),
    "vectors": (MATRIX, {"blocks": 0, "optimizer_class": torch.optim.Muon}, r"Muon .*2D"),
    "8 bits": ((128, 64), {"blocks": [64, 64], "optimizer_class": Blockwise}, "own 'momentum', a Blocks that"),
    "a number": (MATRIX, {"blocks": [3, 1], "optimizer_class": SizedByNumber}, "has its own 'rows', a float that is"),
    "rows": (
        (4, 6),
        {"blocks": [1] * 4, "optimizer_class": Columns},
        "own 'rows', which together have the",
    ),
    "a list": (MATRIX, {"blocks": [2, 2], "optimizer_class": Lists}, r"Lists .* of '0': .* own 'norms', a list that"),
    "squares": ((32, 16), {"blocks": QKV, "optimizer_class": Left}, "own 'left', of another shape each, and"),
    "one square": ((32, 16), {"blocks": [8, 8, 16], "optimizer_class": Right}, "own 'right', of another shape each"),
    "other states": (
        (96, 128),
        {"blocks": [16, 16, 64], "optimizer_class": Larger},
        "other sizes have states of other",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_blocks_is_refused_with_the_remedy(name: str) -> None:
    shape, group, said = REFUSED[name]
    model = nn.ParameterList([nn.Parameter(torch.randn(shape))])
    with pytest.raises(ValueError, match=said):
        ZeroOptimizer([{"params": list(model.named_parameters()), **group}], torch.optim.AdamW, process_group=solo())


def test_a_stack_in_another_memory_order_is_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(4, 6, 3).transpose(1, 2))])
    groups = [{"params": list(model.named_parameters()), "blocks": 0}]
    with pytest.raises(ValueError, match=r"is not row-major, .* make it .contiguous\(\)"):
        ZeroOptimizer(groups, torch.optim.Muon, process_group=solo())


def test_a_group_of_blocks_can_be_added_and_states_kept_in_a_folder(tmp_path: Path) -> None:
    plain = plain_of(made(Stacks), 4)
    train(plain, range(3), 4)

    def run(model: nn.Module, transport: Transport) -> nn.Module:
        *stacks, rest = groups_of(model)
        settings: dict[str, Any] = {"stage": 2, "process_group": transport, "bucket_cap_mb": 0.01}
        settings["offload"] = zero.Offload(tmp_path)
        optimizer = ZeroOptimizer([rest], torch.optim.AdamW, module=model, **settings)
        for group in stacks:
            optimizer.add_param_group(group)
        train(optimizer, range(3), 4)
        optimizer.close()
        return model

    for model in on_ranks(2, run, Stacks):
        assert_same_model(model, plain.model)


def test_ranks_with_other_blocks_learn_of_it_when_they_build() -> None:
    def run(model: nn.Module, transport: Transport) -> str:
        return error_of(lambda: optimizer_over(model, transport, 2, sizes=[16, 16] if transport.rank else QKV))

    for error in on_ranks(2, run, Stacks):
        assert "qkv [32, 16]" in error
        assert "stack [(16, 16), (16, 16)]" in error
