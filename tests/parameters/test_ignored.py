"""Parameters that an optimizer leaves to another one, or to nobody: the bits of one plain loop over all of them.

What cannot be ignored is a law: see `tests/dials/places.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_value
from ..support.rows import rows
from ..support.sides import AsPlain
from .experts import Pair, Sparse, assert_trained, pair_on

BF16 = PRECISIONS["bf16"]


@pytest.mark.parametrize(
    ("stages", "ranks", "precision", "more"),
    rows(
        [((3, 3), 4, "", {}), ((2, 1), 2, "bf16", {})],
        [
            ((0, 2), 6, "", {}),
            ((3, 0), 4, "bf16", {"sharding_factor": 2}),
            ((3, 3), 2, "", {"reshard_after_forward": False}),
        ],
    ),
    ids=str,
)
def test_experts_of_fewer_ranks_train_the_bits_of_one_plain_loop_with_one_norm(
    stages: tuple[int, int], ranks: int, precision: str, more: dict[str, Any]
) -> None:
    def program(transport: Transport) -> tuple[Sparse, list[Tensor]]:
        pair = pair_on(transport, stages, PRECISIONS.get(precision), **more)
        norms = pair.train(range(3))
        return pair.close(), norms

    assert_trained(on_threads(ranks, program), 3, PRECISIONS.get(precision))


def test_checkpoints_and_state_dicts_leave_it_out_and_training_goes_on_at_another_topology(tmp_path: Path) -> None:
    def paths(pair: Pair) -> tuple[Path, Path]:
        return tmp_path / "dense", tmp_path / f"expert-{pair.expert}"

    def save(transport: Transport) -> None:
        pair = pair_on(transport, (1, 3))
        pair.train(range(2))
        for path, optimizer in zip(paths(pair), (pair.dense, pair.own), strict=True):
            zero.save(path, optimizer)
        dense, own = pair.dense.full_state_dict(to=None) or {}, pair.own.full_state_dict(to=None) or {}
        whole = {**dense, **{f"layers.{name[0]}.experts{name[1:]}": value for name, value in own.items()}}
        named = [*pair.model.named_parameters(), *pair.model.named_buffers()]
        assert len(whole) == len(dense) + len(own)
        assert whole.keys() == {name for name, _ in named}
        pair.dense.load_full_state_dict(whole)  # the names of what is ignored are skipped
        assert_same_value(pair.own.full_state_dict(to=None), own, "experts")
        pair.close()

    def load(transport: Transport) -> tuple[Sparse, list[Tensor]]:
        pair = pair_on(transport, (3, 2))
        for path, optimizer in zip(paths(pair), (pair.dense, pair.own), strict=True):
            zero.load(path, optimizer, rng=False)
        norms = pair.train(range(2, 3))
        return pair.close(), norms

    on_threads(4, save)
    assert_trained(on_threads(2, load), 3)


# -- what nobody trains ------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A layer behind one that is each rank's own, which no optimizer has."""

    def __init__(self, rank: int, ranks: int = 1) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(ranks)])
        self.layer = nn.Linear(3, 2)
        with torch.no_grad():
            for number, each in enumerate(self.own):
                each.weight.copy_(torch.eye(3) * (1.5 + rank + number))  # type: ignore[operator]
            for parameter in self.layer.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        found: Tensor = self.layer(self.own[number](x)).float().square().sum()
        return found


def gated_loss(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss of a micro-batch, in the plain loop's model of all ranks or in that of one."""
    loss: Tensor = model(torch.full((1, 3), 1.0 + rank + step), rank if len(model.own) > 1 else 0)
    return loss


def test_what_is_ignored_keeps_its_values_and_a_buffer_that_replaces_one_is_ignored_as_well() -> None:
    """Also if the rest is built from a state dict."""

    def program(transport: Transport) -> Tensor:
        with torch.device("meta"):
            model = Gated(0)
        model.own = nn.ModuleList([nn.Linear(3, 3, bias=False)])
        model.own.seen = nn.Buffer(torch.tensor(1.0))
        with torch.no_grad():
            model.own[0].weight.fill_(transport.rank)  # type: ignore[operator]
        values = {name: torch.full(value.shape, 0.5) for name, value in model.state_dict().items()}
        if transport.rank == 0:  # names of what is ignored may be missing
            values.pop("own.0.weight")
        optimizer = ZeroOptimizer(model, process_group=transport, ignored=model.own, init_state_dict=values)
        model.own.seen = model.own.seen + transport.rank
        optimizer.broadcast_buffers()
        assert "own.seen" not in (optimizer.full_state_dict(to=None) or {})
        assert float(model.own.seen) == 1 + transport.rank
        optimizer.close()
        assert model.layer.weight.eq(0.5).all()
        return model.own[0].weight.detach()  # type: ignore[return-value, union-attr, operator]

    for rank, weight in enumerate(on_threads(2, program)):
        assert weight.eq(rank).all()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_nobody_trains_stays_as_it_is_inside_join_and_in_mixed_precision(stage: int) -> None:
    counts = (1, 3, 2)
    gated = Gated(0, 3)
    plain = AsPlain(gated, lambda _: torch.optim.AdamW(gated.layer.parameters(), lr=0.1), 3)
    for step in range(3):
        mine = [rank for rank in range(3) if step < counts[rank]]
        plain.train(lambda model, rank, step=step: gated_loss(model, rank, step), ranks=mine)  # type: ignore[misc]
        plain.step()
        plain.clear()

    def program(transport: Transport) -> nn.Module:
        model = Gated(transport.rank)
        weight = model.own[0].weight
        before, address = weight.detach().clone(), weight.data_ptr()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, lr=0.1, ignored=model.own)
        with optimizer.join():
            for step in range(counts[transport.rank]):
                gated_loss(model, transport.rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        assert type(weight.grad) is Tensor  # as autograd has left it, of this rank alone
        optimizer.broadcast_buffers()
        with optimizer.gathered(write=True):
            pass
        assert_same_bits(weight, before)
        assert weight.data_ptr() == address
        described = optimizer.describe()
        assert [name for bucket in described.buckets for name in bucket.names] == ["layer.bias", "layer.weight"]
        assert described.bytes["parameters"] == described.formula_bytes["parameters"] <= 4 * 64
        optimizer.close()
        narrow = ZeroOptimizer(model, stage=stage, process_group=transport, mixed_precision=BF16, ignored=[weight])
        assert weight.dtype is torch.float32
        narrow.close()
        return model.layer.float()

    expected = gated.layer.bfloat16().float().state_dict()
    for layer in on_threads(3, program):
        assert_same_value(layer.state_dict(), expected, "the layer")
