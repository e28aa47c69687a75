"""Parameters that an optimizer leaves to another one, or to nobody: the bits of one plain loop over all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer

from ..support.errors import error_of
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_value
from ..support.rows import rows
from ..support.sides import AsPlain
from .expert_jobs import Gated, gated_loss
from .experts import MICRO_BATCHES, Pair, Sparse, assert_trained, loss_of, plain_loop, sparse

BF16 = PRECISIONS["bf16"]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("stages", "ranks", "precision", "more"),
    rows(
        [
            pytest.param((3, 3), 4, None, {}, id="3-3-4"),
            pytest.param((2, 1), 2, BF16, {}, id="2-1-2-bf16"),
            pytest.param((0, 2), 6, None, {}, id="0-2-6"),
        ],
        [
            pytest.param((3, 0), 4, BF16, {"sharding_factor": 2}, id="3-0-4-bf16-factor"),
            pytest.param((1, 3), 4, BF16, {}, id="1-3-4-bf16"),
            pytest.param((3, 3), 2, None, {"reshard_after_forward": False}, id="3-3-2-kept"),
            pytest.param((2, 2), 12, None, {}, id="2-2-12"),
        ],
    ),
)
def test_experts_of_fewer_ranks_train_the_bits_of_one_plain_loop_with_one_norm(
    stages: tuple[int, int], ranks: int, precision: MixedPrecision | None, more: dict[str, Any]
) -> None:
    plain, expected = plain_loop(3, precision)

    def program(transport: Transport) -> tuple[Sparse, list[Tensor]]:
        pair = Pair(transport, stages, precision, **more)
        norms = pair.train(range(3))
        for layer in pair.model.layers:
            assert layer.experts.of[str(pair.expert)].whose == pair.expert  # type: ignore[union-attr, index, operator]
            assert layer.offset.eq(0.5).all()  # type: ignore[operator, union-attr]
        return pair.close(), norms

    for model, norms in on_threads(ranks, program):
        assert_trained(model, plain)
        for mine, theirs in zip(norms, expected, strict=True):
            assert_same_bits(mine, theirs, "norm")


def test_the_other_optimizer_may_come_first_and_single_parameters_may_be_ignored() -> None:
    plain, _ = plain_loop(1)

    def program(transport: Transport) -> Sparse:
        model = sparse([transport.rank])
        experts = model.experts()
        given: dict[str, Any] = {"stage": 3, "lr": 0.01, "divisor": MICRO_BATCHES}
        own = ZeroOptimizer(experts, process_group=solo(), **given)
        ignored = iter([*experts.parameters(), *experts.buffers()])
        dense = ZeroOptimizer(
            [("first.weight", model.first.weight)], module=model, process_group=transport, ignored=ignored, **given
        )
        left = {id(parameter) for parameter in (*experts.parameters(), model.first.weight)}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in left]
        dense.add_param_group({"params": rest})
        assert "is ignored, and is in a param group" in error_of(
            dense.add_param_group,
            {"params": [experts[0].of[str(transport.rank)].inner.weight]},  # type: ignore[index, union-attr]
        )
        for number in range(transport.rank, MICRO_BATCHES, 2):
            loss_of(model, 0, number).backward()  # type: ignore[no-untyped-call]
        dense.clip_grad_norm_(0.1, also=[own])
        dense.step()
        own.step()
        own.close()
        dense.close()
        return model

    for model in on_threads(2, program):
        assert_trained(model, plain)


@pytest.mark.parametrize("stages", rows([(2, 2), (0, 0)], [(0, 2), (3, 0)]))
def test_a_loss_scaler_skips_the_step_of_all_optimizers_if_a_gradient_of_one_expert_is_not_finite(
    stages: tuple[int, int],
) -> None:
    """The norm is that of all, so it would carry the NaN into the others."""

    def program(transport: Transport) -> list[float]:
        pair, scaler, found = Pair(transport, stages), torch.amp.GradScaler("cpu", init_scale=64.0), list[float]()
        before = pair.dense.full_state_dict(to=None)
        weight = next(pair.model.experts().parameters())
        hook = weight.register_hook(lambda gradient: gradient * (math.nan if pair.expert == 1 else 1))
        for step in range(2):
            for number in range(pair.rank, MICRO_BATCHES, pair.world_size):
                scaler.scale(loss_of(pair.model, step, number)).backward()
            hook.remove()
            for optimizer in (pair.dense, pair.own):
                scaler.unscale_(optimizer)
            pair.dense.clip_grad_norm_(0.1, also=[pair.own])
            for optimizer in (pair.dense, pair.own):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            if step == 0:
                assert_same_value(pair.dense.full_state_dict(to=None), before, "dense parameters")
            found.append(scaler.get_scale())
        assert all(parameter.isfinite().all() for parameter in pair.close().parameters())
        return found

    assert on_threads(2, program) == [[32.0, 32.0]] * 2


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


def test_checkpoints_and_state_dicts_leave_it_out_and_training_goes_on_at_another_topology(
    tmp_path: Path,
) -> None:
    plain, _ = plain_loop(3)

    def paths(pair: Pair) -> tuple[Path, Path]:
        return tmp_path / "dense", tmp_path / f"expert-{pair.expert}"

    def save(transport: Transport) -> list[str]:
        pair = Pair(transport, (1, 3))
        pair.train(range(2))
        for path, optimizer in zip(paths(pair), (pair.dense, pair.own), strict=True):
            zero.save(path, optimizer)
        dense, own = pair.dense.full_state_dict(to=None), pair.own.full_state_dict(to=None)
        assert dense is not None
        assert own is not None
        assert not any("experts" in name for name in dense)
        whole = {**dense, **{f"layers.{name[0]}.experts{name[1:]}": value for name, value in own.items()}}
        named = [*pair.model.named_parameters(), *pair.model.named_buffers()]
        assert whole.keys() == {name for name, _ in named}
        pair.dense.load_full_state_dict(whole)  # the names of what is ignored are skipped
        assert_same_value(pair.own.full_state_dict(to=None), own, "experts")
        pair.close()
        return sorted(whole)

    def load(transport: Transport) -> Sparse:
        pair = Pair(transport, (3, 2))
        for path, optimizer in zip(paths(pair), (pair.dense, pair.own), strict=True):
            zero.load(path, optimizer, rng=False)
        pair.train(range(2, 3))
        return pair.close()

    on_threads(4, save)
    for model in on_threads(2, load):
        assert_trained(model, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_nobody_trains_stays_as_it_is_inside_join_and_in_mixed_precision(stage: int) -> None:
    counts = (1, 3, 2)
    gated = Gated(0, 3)
    plain = AsPlain(gated, lambda _: torch.optim.AdamW(gated.layer.parameters(), lr=0.1), 3)

    for step in range(3):
        mine = [rank for rank in range(3) if step < counts[rank]]
        plain.train(lambda model, rank, step=step: gated_loss(model, rank, step), ranks=mine)  # type: ignore[misc]
        plain.settle()
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
        assert isinstance(weight.grad, Tensor)  # as autograd has left it, of this rank alone
        assert type(weight.grad) is Tensor
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

    for layer in on_threads(3, program):
        expected = plain.model.layer.bfloat16().float()
        assert_same_value(layer.state_dict(), expected.state_dict(), "the layer")
