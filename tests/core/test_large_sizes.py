"""Laws about numbers: sizes may exceed 2^31 elements, and a missing gradient is not a zero.

Large tensors are on torch's meta device: sizes, strides and offsets without memory.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Kind, Pairwise, Ring, Tag, Traffic, Transport, on_threads
from collectives.messages import HEADER_BYTES, with_offset
from zero import ZeroOptimizer
from zero.core.bits import dense_stride
from zero.core.buckets import build
from zero.core.formulas import KeptStates, formula_bytes, formula_traffic
from zero.core.layout import Dtypes, Layout, ParameterSpec
from zero.core.stage import STAGES, Placement
from zero.parameters.gathered.buffers import GatheredBuffer
from zero.runtime.accumulator import GradAccumulator
from zero.runtime.flat_buffer import FlatBuffer
from zero.runtime.flat_states import BucketStates
from zero.runtime.streams import Streams
from zero.step.user_optimizer import UserOptimizer, _param_groups

from ..contract.test_steps import ALL_STAGES
from ..support.plain import bits

META = torch.device("meta")
LIMIT = 2**31 - 1
SHAPES = [(3,), (7, LIMIT), (5, 2**30 + 3), (), (0, 4), (LIMIT, 3), (1,)]
"""In order of registration; the layout turns it around, so that all but the last large one lie beyond the limit."""


def spec_of(index: int, parameter: Tensor) -> ParameterSpec:
    name, stride = (f"p{index}",), dense_stride(parameter)
    dtypes = Dtypes.all(parameter.dtype)
    return ParameterSpec(name, tuple(parameter.shape), stride, dtypes, "meta", True, 0, index)


def large_layout(world_size: int, dtype: torch.dtype = torch.float32) -> Layout:
    parameters = [torch.empty(shape, dtype=dtype, device=META) for shape in SHAPES]
    parameters[2] = torch.empty(2**30 + 3, 5, dtype=dtype, device=META).t()
    specs = [spec_of(index, parameter) for index, parameter in enumerate(parameters)]
    layout = build(specs, world_size, 2**50)
    assert len(layout.buckets) == 1
    assert layout.numel > 12 * LIMIT
    return layout


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_and_slices_beyond_two_to_the_31_tile_the_bucket(world_size: int, dtype: torch.dtype) -> None:
    layout = large_layout(world_size, dtype)
    (bucket,) = layout.buckets
    flat = torch.empty(bucket.numel, dtype=dtype, device=META)
    covered = dict.fromkeys(range(len(bucket.slots)), 0)
    for rank in range(world_size):
        low, high = bucket.owned(rank)
        end = low
        for piece in bucket.pieces(low, high):
            slot = bucket.slots[piece.slot]
            assert slot.offset <= piece.begin <= piece.end <= slot.end
            assert end <= piece.begin
            assert flat[low:high][piece.begin - low : piece.end - low].numel() == piece.numel
            covered[piece.slot] += piece.numel
            end = piece.end
    assert covered == {number: slot.numel for number, slot in enumerate(bucket.slots)}
    parameters = [torch.empty_strided(spec.shape, spec.stride, device=META) for spec in layout.parameters]
    members = [parameters[slot.parameter] for slot in bucket.slots]
    buffer = GatheredBuffer(bucket, layout, members, flat, True, [nn.Parameter] * len(members), unsharded=flat)
    buffer.put_unsharded()
    for number, (slot, view) in enumerate(zip(bucket.slots, buffer.parameters, strict=True)):
        spec = layout.parameters[slot.parameter]
        assert (view.storage_offset(), tuple(view.shape), view.stride()) == (slot.offset, spec.shape, spec.stride)
        if slot.numel:
            assert buffer.slot_at(slot.offset) == buffer.slot_at(slot.end - 1) == number
    assert max(slot.offset for slot in bucket.slots) > LIMIT


@ALL_STAGES
def test_bytes_and_traffic_beyond_two_to_the_31_are_exact(stage: int) -> None:
    layout, world_size = large_layout(4), 4
    found = formula_bytes(layout, STAGES[stage], 3, lambda _: KeptStates(2 * 4))
    psi = 7 * LIMIT + 5 * (2**30 + 3) + 3 * LIMIT + 5
    assert layout.numel == psi
    padded, slack = layout.buckets[0].numel, 512 * len(layout.parameters)
    assert 4 * psi <= 4 * padded <= 4 * psi + slack
    last = 16 * -(-padded // 16 // world_size)  # the last rank has the largest shard
    owned = [4 * padded if stage < number else 4 * last for number in (3, 2, 1)]
    assert found["parameters"] == owned[0]
    assert found["gradients"] == owned[1] + (4 * last if stage == 0 else 0)
    assert found["optimizer"] == 2 * owned[2]
    gathers = 1 if stage == 3 else 0  # of the root unit, for the forward only
    passes = {0: 2, 1: 2, 2: 2, 3: 1}[stage] + gathers
    assert formula_traffic(layout, STAGES[stage], 1, 1) == 3 * passes * 4 * padded


@pytest.mark.parametrize("algorithm", [Pairwise, Ring])
@ALL_STAGES
def test_gradients_beyond_two_to_the_31_are_taken_reduced_and_gathered(
    stage: int, algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the shapes that are sent, and the bytes that are counted."""
    monkeypatch.setattr("collectives.algorithms.ordered_sum.DEVICE_BLOCK", LIMIT)
    monkeypatch.setattr("collectives.transport.CHUNK", LIMIT)
    layout = large_layout(3)
    (bucket,) = layout.buckets

    def program(transport: Transport) -> Traffic:
        specs = [layout.parameters[slot.parameter] for slot in bucket.slots]
        store = GradAccumulator(bucket, specs, STAGES[stage], transport, Streams())
        collective = algorithm(transport)
        for _ in range(2):
            for number, slot in enumerate(bucket.slots):
                store.add(number, torch.empty(layout.parameters[slot.parameter].shape, device=META))
            store.launch(collective, "a backward", 2**40, b"\1" * len(bucket.slots)).wait()
        store.divide(3)
        total = store.running_sum()
        assert total is not None
        assert total.data.numel() == store.high - store.low > LIMIT
        if STAGES[stage].grads_replicated:
            store.gather_means(collective, 2**40, 3.0).wait()
            assert store.mean_view(1).shape == layout.parameters[bucket.slots[1].parameter].shape
        return transport.traffic

    found = on_threads(3, program, timeout=10)
    passes = 3 if STAGES[stage].grads_replicated else 2
    assert sum(traffic.payload_sent for traffic in found) == passes * 2 * 4 * bucket.numel


@pytest.mark.parametrize("arguments", [{"foreach": True}, {"foreach": False}])
def test_states_beyond_two_to_the_31_have_a_run_for_every_piece(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the last of three ranks, whose pieces all lie beyond 2^31; the class steps them."""
    monkeypatch.setattr("zero.runtime.flat_states.CUT", LIMIT)
    layout = large_layout(3)
    (bucket,) = layout.buckets
    begin, end = bucket.owned(2)
    inner = UserOptimizer(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, **arguments})
    slots = [layout.parameters[slot.parameter] for slot in bucket.slots]
    master = torch.empty(end - begin, device=META)
    shapes = [(spec.shape, spec.stride) for spec in slots]
    weights = FlatBuffer(master, Placement.SHARD, begin)
    states = BucketStates(inner.instance(None), bucket, weights, [0] * len(slots), shapes)
    present = b"\1" * len(states.pieces)
    states.plan(present, frozenset())
    assert sum(run.end - run.begin for run in states.runs) >= sum(piece.numel for piece in states.pieces) > LIMIT
    groups = [{**inner.defaults, "params": []}]
    for run in states.runs:
        run.parameter.grad = torch.empty_like(run.parameter)
    states.instance.param_groups = _param_groups(states, dict(enumerate(groups)))
    states.instance.step()
    states.adopt_states(frozenset({"momentum_buffer"}))
    assert states.flat["momentum_buffer"].data.numel() == end - begin


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32, 2**40 + 1, 2**62])
def test_headers_tell_sizes_and_rounds_beyond_two_to_the_31(size: int) -> None:
    tag = Tag(Kind.REDUCE_SCATTER, "bucket 0", round=size, index=LIMIT, digest=2**32 - 1)
    packed = with_offset(tag.pack(size))
    assert len(packed) == HEADER_BYTES
    assert Tag.unpack(packed) == (tag, size)
    with pytest.raises(struct.error):
        replace(tag, round=2**63).pack(size)


# -- a missing gradient is not a zero ---------------------------------------------------------------------------------


class Signs(nn.Module):
    """A model whose gradient is ``sign`` * 0.0 if it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.full((3,), -0.0)), nn.Parameter(torch.ones(3))

    def forward(self, sign: float | None) -> Tensor:
        loss = self.other.sum()
        return loss if sign is None else loss + (self.weight * sign * 0.0).sum()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ((-1.0, None), -0.0),
        ((None, -1.0), -0.0),
        ((-1.0, -1.0), -0.0),
        ((1.0, None), 0.0),
        ((-1.0, 1.0), 0.0),
        ((None, None), None),
    ],
)
def test_a_missing_gradient_adds_nothing_not_even_a_sign(
    stage: int, signs: tuple[float | None, float | None], expected: float | None
) -> None:
    """-0.0 + 0.0 is 0.0, and -0.0 + -0.0 is -0.0: only adding -0.0 preserves a negative zero.

    A gradient that no rank has is None.
    """

    def program(transport: Transport) -> Tensor | None:
        model = Signs()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.5)
        model(signs[transport.rank]).backward()
        found = optimizer.full_grad(model.weight)
        optimizer.step()
        moved = torch.full((3,), -0.0)  # -0.0 - 0.5 * 0.0 is -0.0, and -0.0 - 0.5 * -0.0 is 0.0
        if expected is not None:
            moved.add_(torch.full((3,), expected), alpha=-0.5)
        assert torch.equal(bits(model.weight), bits(moved))
        return found

    for found in on_threads(2, program, timeout=5):
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert torch.equal(bits(found), bits(torch.full((3,), expected)))
