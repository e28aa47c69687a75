"""After an optimizer has ended or failed the model is free, and several train in one process without a trace."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from collectives import Kind, Loopback, Tag, Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_

from ..support.errors import error_of, is_plain
from ..support.limits import BOUND
from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_model
from ..support.programs import locked_build
from ..support.rows import rows
from ..support.small import TwoVectors, plain_two, with_sgd

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.mark.law("weak hooks")
def test_hooks_do_not_keep_the_optimizer_and_a_deep_copy_is_free() -> None:
    model = locked_build(0)
    optimizer = ZeroOptimizer(model)
    copied = copy.deepcopy(model)
    odd_loss(copied, odd_batches(1)[0]).backward()
    assert type(copied.last.weight.grad) is Tensor
    assert model.last.weight.grad is None
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    odd_loss(model, odd_batches(1)[0]).backward()
    assert type(model.last.weight.grad) is Tensor


class Training:
    """Holds an optimizer whose ``units`` is a function of this object."""

    def __init__(self, stage: int) -> None:
        self.kind = nn.Linear
        self.model = locked_build(0)
        units = (lambda part: isinstance(part, self.kind)) if stage == 3 else None
        self.optimizer = ZeroOptimizer(self.model, stage=stage, units=units)

    def step(self) -> weakref.ref[Tensor]:
        """Take a step; return its activations."""
        hidden: Tensor = self.model.first(self.model.embed(torch.tensor([1, 2])))
        hidden.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return weakref.ref(hidden)


@pytest.mark.law("buffer lifetimes")
@pytest.mark.parametrize("stage", rows([3], [0, 1, 2]))
def test_nothing_waits_for_the_garbage_collector(stage: int) -> None:
    gc.collect()
    gc.disable()
    try:
        training = Training(stage)
        activations = [training.step() for _ in range(3)]
        assert [reference() for reference in activations] == [None] * 3
        optimizer = training.optimizer
        parts = [weakref.ref(part) for part in (training, optimizer, optimizer._reducer)]
        parts.append(weakref.ref(optimizer._storage.buckets[0].weights.data))
        optimizer.close()
        del optimizer, training
        assert [reference() for reference in parts] == [None] * len(parts)
    finally:
        gc.enable()


@pytest.mark.law("exceptions")
def test_after_a_failure_every_call_names_it_and_close_frees_the_model() -> None:
    def program(transport: Transport) -> list[str]:
        model = TwoVectors()
        optimizer = with_sgd(model, transport)
        model(1.0).backward()
        first = optimizer.step if transport.rank else optimizer.check_replicas
        messages = [error_of(call) for call in (first, optimizer.step, model(1.0).backward)]
        with optimizer.no_sync():
            messages.append(error_of(model(1.0).backward))
        optimizer.close()
        assert is_plain(model)
        return messages

    for first, *later in on_threads(2, program, timeout=BOUND):
        assert "step()" in first
        assert "check_replicas()" in first
        assert all("closed since an earlier failure" in message for message in later)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_a_group_failed_half_way_close_frees_the_model(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is left for the gradients of the group, say, when its parameters have been stored already."""

    def program(transport: Transport) -> list[str]:
        model = TwoVectors()
        optimizer = ZeroOptimizer(
            [model.a], torch.optim.SGD, module=model, stage=stage, process_group=transport, lr=0.1
        )
        transport.exchange(b"", Tag(Kind.EXCHANGE, "all are built"))
        monkeypatch.setattr("zero.setup.GradAccumulator", None)
        messages = [error_of(optimizer.add_param_group, {"params": [model.b]})]
        assert optimizer.describe().bytes["optimizer"] == 0
        messages.append(error_of(optimizer.step))
        optimizer.close()
        assert is_plain(model)
        assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 2
        assert_same_model(model, TwoVectors())
        return messages

    for first, second in on_threads(2, program, timeout=BOUND):
        assert "NoneType" in first
        assert "closed since an earlier failure" in second


@pytest.mark.law("exceptions")
def test_an_interrupt_inside_a_wait_loses_nothing() -> None:
    armed = [False]

    def interfere(rank: int, event: str, peer: int) -> None:
        if armed[0] and rank == 0 and event == "wait":
            armed[0] = False
            raise KeyboardInterrupt

    def program(transport: Transport) -> TwoVectors:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, bucket_cap_mb=1e-6)
        armed[0] = armed[0] or transport.rank == 0
        try:
            model(1.0 + transport.rank).backward()
        except KeyboardInterrupt:
            assert transport.rank == 0
        optimizer.step()
        return model

    ours = Loopback[TwoVectors](2, timeout=BOUND, interfere=interfere).run(program)[1]
    assert_same_bits(ours.b, plain_two([(1.0, True), (2.0, True)], 2).b)


@pytest.mark.law("group ranks")
@ALL_STAGES
def test_groups_of_one_world_train_apart(stage: int) -> None:
    """{1, 3} and {0, 2} of four, at the same time, with data, sums and norms of their own."""

    def program(transport: Transport) -> tuple[nn.Module, Tensor]:
        odd = transport.rank % 2
        group = transport.split([1, 3] if odd else [0, 2])
        model = TwoVectors()
        optimizer = with_sgd(model, group, stage=stage, module=model)
        model(1.0 + group.rank + 10 * odd).backward()
        norm = optimizer.clip_grad_norm_(50.0)
        optimizer.step()
        optimizer.close()
        return model, norm

    for rank, (model, norm) in enumerate(on_threads(4, program, timeout=BOUND)):
        batches = [(1.0 + group_rank + 10 * (rank % 2), True) for group_rank in range(2)]
        assert_same_model(model, plain_two(batches, 2, clip=50.0))
        unclipped = plain_two(batches, 2, steps=0)
        for batch in batches:
            (unclipped(*batch) / 2).backward()  # dividing by a power of two changes no bits of the sum
        assert_same_bits(norm, clip_grad_norm_(unclipped.parameters(), 50.0))
