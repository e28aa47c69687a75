"""After an optimizer has ended or failed the model is free, and several train in one process without a trace."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from collectives import Loopback, Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_
from zero.gradients.placeholder import ShardedGradient

from ..support.errors import error_of, is_plain
from ..support.generator import CALLS
from ..support.limits import BOUND
from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_model, plain_step
from ..support.programs import locked_build
from ..support.small import TwoVectors, plain_two, with_sgd
from ..support.trainings import ALL_STAGES, SGD, Two, trained


@ALL_STAGES
def test_close_makes_the_model_plain_again(stage: int) -> None:
    def program(transport: Transport) -> None:
        model, optimizer = trained(transport, stage)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.close()
        optimizer.close()
        for name, p in model.named_parameters():
            assert_same_bits(p, before[name])
            assert p.stride() == before[name].stride()
            assert p.untyped_storage().nbytes() == p.numel() * 4
            assert not isinstance(p.grad, ShardedGradient)
            p.grad = None
        odd_loss(model, odd_batches(1)[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    on_threads(2, program)


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


def test_an_optimizer_can_be_built_again_over_the_same_model_and_the_old_one_says_so() -> None:
    model = locked_build(0)
    old = ZeroOptimizer(model, SGD, lr=0.1)
    odd_loss(model, odd_batches(1)[0]).backward()
    new = ZeroOptimizer(model, SGD, lr=0.1)
    odd_loss(model, odd_batches(1)[0]).backward()
    new.step()
    plain = locked_build(0)
    plain_step(plain, SGD(plain.parameters(), lr=0.1), odd_loss, odd_batches(1), 1)
    assert_same_model(model, plain)
    with pytest.raises(RuntimeError, match="a newer ZeroOptimizer took over"):
        old.step()


@ALL_STAGES
def test_nothing_waits_for_the_garbage_collector(stage: int) -> None:
    gc.collect()
    gc.disable()
    try:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=stage)
        activations = []
        for _ in range(3):
            hidden = model.first(model.embed(torch.tensor([1, 2])))
            activations.append(weakref.ref(hidden))
            hidden.square().sum().backward()
            del hidden
            optimizer.step()
            optimizer.zero_grad()
        assert [reference() for reference in activations] == [None] * 3
        parts = [
            weakref.ref(optimizer),
            weakref.ref(optimizer._reducer),
            weakref.ref(optimizer._storage.buckets[0].weights.data),
        ]
        optimizer.close()
        del optimizer
        assert [reference() for reference in parts] == [None] * 3
    finally:
        gc.enable()


class Training:
    """Holds an optimizer whose ``units`` is a function of this object."""

    def __init__(self, stage: int) -> None:
        self.kind = nn.Linear
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.optimizer = ZeroOptimizer(self.model, stage=stage, units=lambda part: isinstance(part, self.kind))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_does_not_keep_the_functions_that_it_was_built_with(stage: int) -> None:
    gc.collect()
    gc.disable()
    try:
        training = Training(stage)
        training.optimizer.close()
        parts = [weakref.ref(training), weakref.ref(training.optimizer)]
        del training
        assert [reference() for reference in parts] == [None] * 2
    finally:
        gc.enable()


def test_after_a_failure_every_call_names_it_and_close_frees_the_model() -> None:
    def program(transport: Transport) -> list[str]:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, process_group=transport, lr=0.1)
        model(1.0).backward()
        first = optimizer.step if transport.rank else optimizer.check_replicas
        messages = [error_of(call) for call in (first, optimizer.step, model(1.0).backward)]
        optimizer.close()
        assert is_plain(model)
        return messages

    for first, *later in on_threads(2, program, timeout=BOUND):
        assert "step()" in first
        assert "check_replicas()" in first
        assert all("closed since an earlier failure" in message for message in later)


def test_an_interrupt_inside_a_wait_loses_nothing() -> None:
    armed = [False]

    def interfere(rank: int, event: str, peer: int) -> None:
        if armed[0] and rank == 0 and event == "wait":
            armed[0] = False
            raise KeyboardInterrupt

    def program(transport: Transport) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, process_group=transport, bucket_cap_mb=1e-6, lr=0.1)
        armed[0] = armed[0] or transport.rank == 0
        try:
            model(1.0 + transport.rank).backward()
        except KeyboardInterrupt:
            assert transport.rank == 0
        optimizer.step()
        return model

    plain = Two()
    for rank in range(2):
        plain(1.0 + rank).backward()
    for p in plain.parameters():
        p.grad.div_(2)  # type: ignore[union-attr]
    SGD(plain.parameters(), lr=0.1).step()
    ours = Loopback[nn.Module](2, timeout=BOUND, interfere=interfere).run(program)[1]
    assert_same_bits(ours.b, plain.b)


def test_threads_that_save_and_restore_the_generator_do_not_stop_the_process() -> None:
    """The ranks of these tests do so, and `tests.support.generator` makes it safe, here too."""
    assert all(hasattr(getattr(module, name), "__wrapped__") for module in (torch, torch.random) for name in CALLS)
    command = [sys.executable, "-m", "tests.support.generator", "alone"]
    assert subprocess.run(command, cwd=Path(__file__).resolve().parents[2], timeout=100).returncode == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
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


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_second_optimizer_changes_nothing_of_the_first(stage: int) -> None:
    def program(transport: Transport) -> tuple[nn.Module, nn.Module]:
        one, two = TwoVectors(), TwoVectors()
        first = with_sgd(one, transport, stage=stage, divisor=3)
        second = with_sgd(two, transport, stage=stage, divisor=7)
        for model, optimizer in ((one, first), (two, second)):
            model(1.0 + transport.rank).backward()
            optimizer.step()
        return one, two

    batches = [(1.0, True), (2.0, True)]
    for one, two in on_threads(2, program, timeout=BOUND):
        assert_same_model(one, plain_two(batches, 3))
        assert_same_model(two, plain_two(batches, 7))
