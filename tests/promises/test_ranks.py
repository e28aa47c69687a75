"""What one rank does differently is one error on every rank, soon, with the rank; close() then frees the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Loopback, Transport, on_threads
from collectives.backends.gloo import connect
from zero import ZeroOptimizer, clip_grad_norm_

from ..support.errors import assert_in_order, error_of, is_plain, warned
from ..support.limits import BOUND
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from ..support.small import TwoVectors, plain_two, with_sgd
from .layers import backward, build, on_ranks, plain, train, zero

pytestmark = pytest.mark.law("errors")


class Rate(float):
    """A number equal to that of the other ranks, which fails in a step."""

    def __neg__(self) -> float:
        raise TypeError("this rate cannot be used")


def frozen(model: Any, optimizer: ZeroOptimizer) -> None:
    model[2].bias.requires_grad_(optimizer.rank == 0)
    optimizer.step()


def frozen_before_a_backward(model: Any, optimizer: ZeroOptimizer) -> None:
    """It shares a bucket with other parameters, which are reduced as usual."""
    model[2].bias.requires_grad_(optimizer.rank == 0)
    backward(model)
    optimizer.step()


def edited(model: Any, optimizer: ZeroOptimizer) -> None:
    optimizer.check_replicas()
    if optimizer.rank == 1:
        model[2].bias.data[1] += 1
    optimizer.check_replicas()


def not_finite(model: Any, optimizer: ZeroOptimizer) -> None:
    (model(torch.ones(1, 4)).sum() * (math.inf if optimizer.rank == 1 else 1)).backward()
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def sparse(model: Any, optimizer: ZeroOptimizer) -> None:
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def in_another_dtype(model: Any, optimizer: ZeroOptimizer) -> None:
    train(model, optimizer)


def saved_alone(model: Any, optimizer: ZeroOptimizer) -> None:
    backward(model)
    (optimizer.step if optimizer.rank else optimizer.full_state_dict)()


def with_an_error_in_a_step(model: Any, optimizer: ZeroOptimizer) -> None:
    backward(model)
    if optimizer.rank == 1:
        optimizer.param_groups[0]["lr"] = Rate(0.5)
    optimizer.step()
    optimizer.check_replicas()


def in_other_calls(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    (optimizer.step if optimizer.rank else optimizer.check_replicas)()


def with_fewer_batches(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    for _ in range(3 - optimizer.rank):
        train(model, optimizer)


Act = Callable[[Any, ZeroOptimizer], None]
ALONE = "Did one rank alone evaluate, generate or save? All ranks call full_state_dict(), too"
FROZEN = "step(): '2.bias' is trainable on rank 0, but frozen on rank 1: freeze and unfreeze on every"
SPARSE = "'weight' is torch.sparse_coo: sparse gradients are not supported … sparse=False"
APART: list[tuple[Act, tuple[int, ...], bool, str]] = [  # stages, and whether the optimizer has failed then
    (frozen, (2,), False, FROZEN),
    (frozen_before_a_backward, (2, 0, 1), True, "backward 1 since"),
    (edited, (2,), False, "'2.bias' differs between rank 0 and rank 1"),
    (not_finite, (3, 0, 1, 2), False, "non-finite"),
    (sparse, (2, 0, 1, 3), False, SPARSE),
    (in_another_dtype, (3, 0, 1, 2), False, "RuntimeError: rank … the gradient of '2.bias': … grad_dtype"),
    (saved_alone, (3, 0, 1, 2), True, f"rank 0 is in full_state_dict(to=0, masters=False) … {ALONE}"),
    (with_an_error_in_a_step, (2, 0, 1, 3), True, "TypeError: this rate cannot be used"),
    (in_other_calls, (3, 1), True, "check_replicas()"),
    (with_fewer_batches, (3, 0, 2), True, "all ranks of a group must make the same calls"),
]


@pytest.mark.law("agreement before a change")
@pytest.mark.law("exceptions")
@pytest.mark.law("norm and overflow")
@pytest.mark.parametrize(
    ("act", "stage", "fails", "words"),
    [
        pytest.param(act, stage, fails, words, id=f"{act.__name__}-{stage}")
        for act, stages, fails, words in APART
        for stage in rows(stages[:1], stages[1:])
    ],
)
def test_ranks_that_train_differently_learn_where_and_a_close_after_it_is_quiet(
    act: Act, stage: int, fails: bool, words: str
) -> None:
    def program(transport: Transport) -> tuple[str, list[str]]:
        model: Any = nn.Embedding(5, 3, sparse=True) if act is sparse else build()
        for parameter in model.parameters() if act is in_another_dtype else ():
            parameter.grad_dtype = torch.float64
        optimizer, later = zero(model, transport, stage, collective="pairwise"), list[str]()

        def closed() -> None:
            with closing(optimizer):
                try:
                    act(model, optimizer)
                except Exception:
                    later.extend(error_of(call) for call in (optimizer.step, lambda: backward(model)) if fails)
                    raise

        said = error_of(closed)
        assert error_of(optimizer.close) == "nothing"
        assert is_plain(model) or (fails and stage == 3)  # whose values other ranks have
        return said, later

    with warned() as messages:
        found = on_threads(2, program, timeout=BOUND)
    for said, later in found:
        assert_in_order(words, said)
        assert said.count("optimizer.join()") <= 1
        assert all("closed since an earlier failure" in text for text in later)
    assert messages == [] or not fails or act is with_an_error_in_a_step
    if act is with_an_error_in_a_step:
        assert "rank 1 failed: rank 1, in step(): TypeError" in found[0][0]
    if act is frozen_before_a_backward:
        assert any("frozen on rank 1: '2.bias'" in said for said, _ in found), found
        assert all("rank 1 is in backward 1 (frozen: '2.bias') since" in said for said, _ in found), found


def in_finally(optimizer: ZeroOptimizer, join: bool = False) -> None:
    with optimizer.join() if join else nullcontext():
        try:
            raise KeyError("the user's own")
        finally:
            optimizer.close()


@pytest.mark.parametrize("stage", rows([3], [0, 1, 2]))
def test_a_close_that_fails_never_hides_the_error_before_it(stage: int) -> None:
    def program(model: Any, optimizer: ZeroOptimizer) -> str:
        train(model, optimizer)
        if optimizer.rank == 1:
            return error_of(optimizer.step)
        message = error_of(in_finally, optimizer)
        assert "this optimizer is closed" in error_of(optimizer.step)
        return message

    with warned() as messages:
        first, second = on_ranks(program, stage)
    assert first == 'KeyError: "the user\'s own"'
    assert "close()" in second
    assert "step()" in second
    (message,) = messages
    assert_in_order("close() after KeyError: … step()", message)


@pytest.mark.parametrize(("stage", "join"), rows([(2, False), (3, True)], [(0, True), (1, False), (3, False)]))
def test_where_all_ranks_fail_alike_close_hides_no_error_and_the_model_is_whole(stage: int, join: bool) -> None:
    """Inside `join()` the close itself fails, with a warning, and the optimizer trains on."""

    def program(model: Any, optimizer: ZeroOptimizer) -> tuple[str, nn.Module]:
        train(model, optimizer)
        message = error_of(in_finally, optimizer, join)
        if join:
            train(model, optimizer)
        optimizer.close()
        return message, model

    with warned() as messages:
        for found, model in on_ranks(program, stage):
            assert 'KeyError: "the user\'s own"' in found
            assert is_plain(model)
            assert_same_model(model, plain(1 + join))
    assert len(messages) == 2 * join
    assert all("close() after KeyError: close() inside a forward" in message for message in messages)


@pytest.mark.parametrize("stage", rows([2], [0, 1]))
def test_after_a_group_failed_half_way_close_frees_the_model(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is left for the gradients of the group, say, when its parameters have been stored already."""

    def program(transport: Transport) -> list[str]:
        model = TwoVectors()
        optimizer = with_sgd([model.a], transport, module=model, stage=stage)
        optimizer.exchange(b"all are built")
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
@pytest.mark.parametrize("stage", rows([2], [0, 1, 3]))
def test_groups_of_one_world_train_apart(stage: int) -> None:
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


@pytest.mark.parametrize("stage", rows([1], [0, 2, 3]))
def test_calls_in_a_hook_that_goes_on_change_nothing_of_the_backward(stage: int) -> None:
    def program(model: Any, optimizer: Any) -> Any:
        said = list[str]()
        calls = (optimizer.step, optimizer.zero_grad)
        with model[0].weight.register_post_accumulate_grad_hook(lambda _: said.extend(map(error_of, calls))):
            backward(model)  # when the first layer is reached, other parameters have gradients
        optimizer.step()
        optimizer.close()
        return said, model

    for (of_step, of_zero_grad), model in on_ranks(program, stage):
        assert "step() inside a backward" in of_step
        assert "stages 2 and 3 shard gradients while the backward runs" in of_step
        assert "zero_grad() inside a backward" in of_zero_grad
        assert_same_model(model, plain())


def test_several_ranks_of_a_launcher_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2, but no process group is initialised: call" in error_of(connect, None)
    assert "init_process_group" in error_of(ZeroOptimizer, nn.Linear(3, 3))
