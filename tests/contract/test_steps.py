"""Laws that hold at every moment of a training step, at every stage: which calls may change an update, and what
remains.

`trained` runs one loop and calls ``at`` between its phases. The calls of a test there must leave the bits of the plain
loop: parameters, norms and states. `test_traces` checks what is left behind, `test_wire` the messages.
"""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Loopback, Transport, on_threads
from collectives.pool import Pool
from zero import ZeroOptimizer, clip_grad_norm_
from zero.core.layout import BucketSpec
from zero.core.stage import STAGES
from zero.parameters.sharded import ShardedStorage

from ..support.models import Odd, build, odd_batches, odd_loss
from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_states

WORLD_SIZE, STEPS, TURNS, MAX_NORM = 2, 3, 2, 0.5
ALL_STAGES = pytest.mark.parametrize("stage", sorted(STAGES))
ARGUMENTS: dict[str, Any] = {"lr": 1e-2, "bucket_cap_mb": 0.0005, "divisor": WORLD_SIZE * TURNS}
At = Callable[[str, Odd, ZeroOptimizer], None]


@dataclass(frozen=True)
class Result:
    parameters: list[Tensor]
    norms: list[Tensor]
    states: dict[str, Any]


def batch_of(step: int, number: int) -> tuple[Tensor, bool]:
    return odd_batches(1, 100 * step + number)[0][0], step % 2 == 1


@functools.cache
def plain() -> Result:
    model, norms = build(0), []
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for number in range(WORLD_SIZE * TURNS):
            odd_loss(model, batch_of(step, number)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(WORLD_SIZE * TURNS)
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM))
        adamw.step()
        model.zero_grad()
    return Result([p.detach() for p in model.parameters()], norms, adamw.state_dict())


def one_step(model: Odd, optimizer: ZeroOptimizer, step: int, norms: list[Tensor], at: At) -> None:
    for turn in range(TURNS):
        loss = odd_loss(model, batch_of(step, turn * optimizer.world_size + optimizer.rank))
        at("forward", model, optimizer)
        loss.backward()
        at("backward" if turn < TURNS - 1 else "last backward", model, optimizer)
    norms.append(optimizer.clip_grad_norm_(MAX_NORM))
    at("clip", model, optimizer)
    optimizer.step()
    at("step", model, optimizer)
    optimizer.zero_grad()
    at("clear", model, optimizer)


def finished(model: Odd, optimizer: ZeroOptimizer, norms: list[Tensor]) -> Result:
    states = []
    for rank in range(optimizer.world_size):
        optimizer.consolidate_state_dict(rank)
        if optimizer.rank == rank:
            states.append(optimizer.state_dict())
    optimizer.close()
    return Result([p.detach() for p in model.parameters()], norms, states[0])


def nothing(*_: Any) -> None:
    return None


def trained(stage: int, at: At = nothing, group: Loopback[Result] | None = None, **arguments: Any) -> list[Result]:
    """Train on all ranks; return the result of each. ``group``: threads to use instead of those of `on_threads`."""
    models = [build(rank) for rank in range(WORLD_SIZE)]

    def program(transport: Transport) -> Result:
        model = models[transport.rank]
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, **{**ARGUMENTS, **arguments})
        norms: list[Tensor] = []
        at("built", model, optimizer)
        for step in range(STEPS):
            one_step(model, optimizer, step, norms, at)
        return finished(model, optimizer, norms)

    return on_threads(WORLD_SIZE, program, timeout=10) if group is None else group.run(program)


def assert_plain_loop(results: list[Result]) -> None:
    for result in results:
        for ours, theirs in zip(result.parameters, plain().parameters, strict=True):
            assert_same_bits(ours, theirs, "a parameter")
        for ours, theirs in zip(result.norms, plain().norms, strict=True):
            assert_same_bits(ours, theirs, "a norm")
        assert_same_states(result.states, plain().states)


# -- calls that must not change an update -----------------------------------------------------------------------------


def everything_but_step(moment: str, model: Odd, optimizer: ZeroOptimizer) -> None:
    """Make every call that is legal at the moment."""
    str(optimizer.describe()), repr(optimizer), optimizer.traffic, {p: dict(s) for p, s in optimizer.state.items()}
    optimizer.check_replicas()
    optimizer.exchange(b"hello")
    for parameter in (model.last.weight, model.unused, model.frozen, model.empty):
        optimizer.full_grad(parameter)
    optimizer.consolidate_state_dict(1)
    if optimizer.rank == 1:
        optimizer.state_dict()["state"].clear()
    with optimizer.gathered():
        copied = copy.deepcopy(model)
        torch.save(model.state_dict(), io.BytesIO())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    if moment != "forward":  # after a forward, this would edit tensors that the backward needs
        with optimizer.gathered([model.one, model.last.weight], write=True):
            pass
        with optimizer.no_sync(), torch.no_grad():
            odd_loss(model, batch_of(7, 0))
    if moment in ("last backward", "clip"):
        for norm_type in (2.0, 3.0, float("inf")):
            optimizer.clip_grad_norm_(float("inf"), norm_type)
    if moment in ("built", "clear"):
        optimizer.zero_grad()
        optimizer.divisor = float(optimizer.divisor)
    if moment == "built":
        with torch.inference_mode():
            odd_loss(model, batch_of(7, 0))
    another = nn.ParameterList([torch.ones(3)])
    other = ZeroOptimizer(another, process_group=optimizer._transport, stage=parts_of(optimizer).stage.number)
    other.close()


@ALL_STAGES
@pytest.mark.by_default("3")
def test_nothing_but_a_step_changes_what_the_next_step_does(stage: int) -> None:
    """Also checks that the process is unchanged: random generators, and torch's global settings."""

    def ambient() -> list[Any]:
        generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
        modes = [torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()]
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return [*generators, *modes, torch.are_deterministic_algorithms_enabled(), hooks]

    plain()
    before = ambient()
    assert_plain_loop(trained(stage, everything_but_step))
    assert ambient() == before


# -- padding and scratch ----------------------------------------------------------------------------------------------


def fill_memory(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """Fill all memory that a transport hands out with this byte."""

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*arguments: Any) -> Tensor:
            found = allocate(*arguments)
            found.view(torch.uint8).fill_(byte)
            return found

        return allocated

    monkeypatch.setattr(Pool, "take", filled(Pool.take))
    monkeypatch.setattr(Transport, "empty", filled(Transport.empty))


def poison_padding(flat: Tensor, bucket: BucketSpec, begin: int, end: int) -> None:
    """Write NaN to all padding of ``flat``, the part [begin, end) of a bucket."""
    padding = torch.ones(end - begin, dtype=torch.bool)
    for piece in bucket.pieces(begin, end):
        padding[piece.begin - begin : piece.end - begin] = False
    flat[padding] = float("nan")


def poison(_: str, __: Odd, optimizer: ZeroOptimizer) -> None:
    storage, rank = optimizer._storage, optimizer.rank
    pools, stage = [optimizer._transport.pool], parts_of(optimizer).stage
    if isinstance(storage, ShardedStorage):
        pools.append(storage.manager.gathered.pool)
        for buffer in storage.manager.buffers():
            poison_padding(buffer.shard, buffer.bucket, *buffer.bucket.owned(rank))
            if buffer.unsharded is not None:
                poison_padding(buffer.unsharded.data, buffer.bucket, 0, buffer.bucket.numel)
    else:
        for bucket in storage.buckets:
            poison_padding(bucket.weights.data, bucket.spec, 0, bucket.spec.numel)
    for bucket in storage.buckets:
        store = bucket.grad
        for tensor in [*store.tensors(), *(b.data for b in (store._local, store._saved_sum) if b is not None)]:
            whole = tensor.numel() == bucket.spec.numel
            poison_padding(tensor, bucket.spec, *((0, tensor.numel()) if whole else (store.low, store.high)))
        for flat in bucket.states.flat.values():
            poison_padding(flat.data, bucket.spec, *stage.update_interval(bucket.spec, rank))
    for pool in pools:
        for block in pool._blocks:
            if block.free:
                torch.empty(0, dtype=torch.uint8).set_(block.storage).fill_(255)


@ALL_STAGES
def test_padding_and_scratch_cannot_be_observed(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is NaN when it is handed out.

    Between the phases NaN is written to all memory that belongs to no parameter: padding of parameters, gradients and
    states, and free buffers. Parameters, norms and states must not change.
    """
    fill_memory(monkeypatch, 255)
    assert_plain_loop(trained(stage, poison))


# -- exceptions -------------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Raised in the middle of an operation, as by the user's code or the keyboard."""


def stop(*_: Any) -> None:
    raise Stop


def in_forward(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with model.layers[1].register_forward_pre_hook(stop):
        odd_loss(model, batch_of(step, 0))


def in_backward_of_activation(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with model.layers[0].register_forward_hook(lambda _, __, out: out.register_hook(stop) and None):
        loss = odd_loss(model, batch_of(step, 0))
    loss.backward()


def in_backward_of_parameter(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    loss = odd_loss(model, batch_of(step, 0))
    with model.first.weight.register_hook(stop):
        loss.backward()


def in_no_sync(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with optimizer.no_sync():
        odd_loss(model, batch_of(step, 0)).backward()
        raise Stop


def in_gathered(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with optimizer.gathered():
        raise Stop


def in_gathered_write(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    with optimizer.gathered(model.last.weight, write=True):
        raise Stop


def in_closure(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    def closure() -> None:
        odd_loss(model, batch_of(step, 0)).backward()
        raise Stop

    optimizer.step(closure)


def in_step_pre_hook(model: Odd, optimizer: ZeroOptimizer, step: int) -> None:
    odd_loss(model, batch_of(step, 0)).backward()
    optimizer.clip_grad_norm_(1e-3)
    handle = optimizer.register_step_pre_hook(stop)
    try:
        optimizer.step()
    finally:
        handle.remove()


PLACES = [in_forward, in_backward_of_activation, in_backward_of_parameter, in_no_sync]
PLACES += [in_gathered, in_gathered_write, in_closure, in_step_pre_hook]


@ALL_STAGES
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_an_exception_anywhere_leaves_an_object_that_goes_on(
    stage: int, place: Callable[[Odd, ZeroOptimizer, int], None]
) -> None:
    """Gradients are cleared, and the step begins again."""

    def at(moment: str, model: Odd, optimizer: ZeroOptimizer) -> None:
        if moment in ("built", "clear"):
            with pytest.raises(Stop):
                place(model, optimizer, 5)
            optimizer.zero_grad()

    assert_plain_loop(trained(stage, at))
