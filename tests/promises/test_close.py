"""`close()` gives the model back after a failure and a takeover, says what is lost, and hides no earlier error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.errors import error_of, is_plain, warned
from ..support.limits import BOUND
from ..support.plain import assert_same_model
from ..support.rows import rows
from .layers import assign, backward, build, narrow, on_ranks, plain, replace, train, widen, zero

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def tie(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


CHANGES: dict[Callable[[Any], None], tuple[str, str]] = {
    tie: ("the module's '2.weight' was replaced", "; lost: the values that this optimizer gave '2.weight'"),
    replace: ("the module's '1.weight' was replaced", "; lost: the values that this optimizer gave '1.weight'"),
    assign: ("the memory of '1.weight' was replaced", "; lost: the values that this optimizer gave '1.weight'"),
    widen: ("is now torch.float64", "move and cast the model before that"),
    narrow: ("is now torch.bfloat16", "move and cast the model before that"),
}


BOTH = (0, 1)


@pytest.mark.parametrize(
    ("stage", "change", "ranks"),
    [
        *((stage, change, BOTH) for stage, change in ((0, assign), (1, widen), (1, narrow), (2, tie), (3, tie))),
        *((stage, replace, (1,)) for stage in (0, 2, 3)),
        *((stage, replace, ()) for stage in (1, 3)),
    ],
)
def test_close_works_at_the_first_call_says_on_every_rank_what_is_lost_and_another_optimizer_trains_on(
    stage: int, change: Callable[[nn.Module], None], ranks: tuple[int, ...]
) -> None:
    problem, loss = CHANGES[change]

    def program(transport: Transport) -> tuple[nn.Module, nn.Module]:
        model = build()
        first = zero(model, transport, stage)
        train(model, first)
        if transport.rank in ranks:
            change(model)
        assert not ranks or problem in error_of(first.step)
        first.close()
        assert is_plain(model)
        closed = copy.deepcopy(model)
        second = zero(model, transport, stage)
        train(model, second)
        second.close()
        return closed, model

    with warned() as messages:
        found = on_threads(2, program, timeout=BOUND)
    for rank, (closed, _) in enumerate(found):
        expected = plain()
        if rank in ranks:
            change(expected)
        assert_same_model(closed, expected)
    trained = found[0][0]
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.5))
    for _, model in found:
        assert_same_model(model, trained)
    assert len(messages) == 2 * bool(ranks)
    for message in messages:
        assert message.startswith(f"close(): rank {ranks[0]}: ")
        assert problem in message
        assert message.endswith(loss) or ranks != BOTH


# -- after a failure ---------------------------------------------------------------------------------------------------


def in_finally(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    try:
        raise KeyError("the user's own")
    finally:
        optimizer.close()


def in_with(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    with closing(optimizer):
        raise KeyError("the user's own")


@pytest.mark.parametrize(("stage", "fail"), [(0, in_with), (1, in_finally), (2, in_with), (3, in_finally)])
def test_a_close_that_fails_never_hides_the_error_before_it(stage: int, fail: Callable[..., None]) -> None:
    """Rank 0 fails and closes while rank 1 continues: neither succeeds, and each gets the reason."""

    def program(model: Any, optimizer: ZeroOptimizer) -> str:
        train(model, optimizer)
        if optimizer.rank == 1:
            return error_of(optimizer.step)
        message = error_of(fail, model, optimizer)
        assert "this optimizer is closed" in error_of(optimizer.step)
        return message

    with warned() as messages:
        first, second = on_ranks(program, stage)
    assert first == 'KeyError: "the user\'s own"'
    assert "close()" in second
    assert "step()" in second
    (message,) = messages
    assert message.startswith("close() after KeyError: ")
    assert "step()" in message


def inside_join(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    with optimizer.join():
        in_finally(model, optimizer)


@pytest.mark.parametrize(("stage", "join"), [(0, True), (1, False), (2, False), (3, False), (3, True)])
def test_where_all_ranks_fail_alike_close_hides_no_error_and_the_model_is_whole(stage: int, join: bool) -> None:
    """Inside `join()` the close itself fails, with a warning, and the optimizer trains on."""

    def program(model: Any, optimizer: ZeroOptimizer) -> tuple[str, nn.Module]:
        train(model, optimizer)
        message = error_of(inside_join if join else in_finally, model, optimizer)
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


def in_other_calls(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    (optimizer.step if optimizer.rank else optimizer.check_replicas)()


def with_fewer_batches(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    for _ in range(3 - optimizer.rank):
        train(model, optimizer)


IN_OTHER_CALLS = (in_other_calls, ("check_replicas()", "step()"))
WITH_FEWER = (with_fewer_batches, ("close()", "all ranks of a group must make the same calls", "optimizer.join()"))


@pytest.mark.parametrize(
    ("stage", "run", "words"),
    [(0, *WITH_FEWER), (1, *IN_OTHER_CALLS), (2, *WITH_FEWER), (3, *IN_OTHER_CALLS), (3, *WITH_FEWER)],
)
def test_a_failure_of_the_ranks_is_the_error_and_a_close_after_it_is_quiet(
    stage: int, run: Callable[..., None], words: tuple[str, ...]
) -> None:
    def program(model: Any, optimizer: ZeroOptimizer) -> tuple[str, str]:

        def closed() -> None:
            with closing(optimizer):
                run(model, optimizer)

        return error_of(closed), error_of(optimizer.close)

    with warned() as messages:
        for found, again in on_ranks(program, stage):
            assert all(found.count(word) >= 1 for word in words), found
            assert found.count("optimizer.join()") <= 1
            assert run is with_fewer_batches or "closed since an earlier failure" not in found
            assert again == "nothing"
    assert messages == []


# -- taken over --------------------------------------------------------------------------------------------------------


def calls_of(optimizer: ZeroOptimizer, parameter: Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "step": optimizer.step,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "zero_grad": optimizer.zero_grad,
        "no_sync": optimizer.no_sync,
        "full_grad": lambda: optimizer.full_grad(parameter),
        "set_full_grad": lambda: optimizer.set_full_grad(parameter, None),
        "full_master": lambda: optimizer.full_master(parameter),
        "full_state_dict": optimizer.full_state_dict,
        "load_full_state_dict": lambda: optimizer.load_full_state_dict({}),
        "offload": optimizer.offload,
        "reload": optimizer.reload,
        "describe": optimizer.describe,
        "check_replicas": optimizer.check_replicas,
        "exchange": lambda: optimizer.exchange(b""),
        "sum_over_ranks": lambda: optimizer.sum_over_ranks(1),
        "gathered": lambda: optimizer.gathered().__enter__(),
        "join": lambda: optimizer.join().__enter__(),
        "broadcast_buffers": optimizer.broadcast_buffers,
        "reset_states": optimizer.reset_states,
        "consolidate_state_dict": optimizer.consolidate_state_dict,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "add_param_group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "divisor": lambda: setattr(optimizer, "divisor", 2.0),
    }


def public(cls: type) -> set[str]:
    facts = {"rank", "world_size", "traffic", "close", "state", "train", "eval"}  # the last two: not of every class
    own = [base for base in cls.__mro__ if base not in torch.optim.Optimizer.__mro__]
    return {name for base in own for name in vars(base) if not name.startswith("_")} - facts


@pytest.mark.parametrize(
    ("older", "newer", "which"),
    [(0, 2, "all"), (1, 3, "others, of the same module"), (2, 0, "some"), (1, 1, "all")],
)
def test_every_call_of_the_older_names_the_takeover_and_its_close_leaves_the_newer_alone(
    older: int, newer: int, which: str
) -> None:
    """At stage 3 a newer optimizer takes over all parameters of its module, listed or not."""

    def parts(model: nn.Module) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        named = list(model.named_parameters())
        return {"all": (named, named), "some": (named, named[2:])}.get(which, (named[:4], named[4:]))

    def program(transport: Transport) -> tuple[dict[str, str], nn.Module]:
        model = build()
        old, new = parts(model)
        first = zero(old, transport, older, module=model)
        backward(model)
        model.zero_grad()
        optimizer = zero(new, transport, newer, module=model)
        found = {name: error_of(call) for name, call in calls_of(first, old[0][1]).items()}
        train(model, optimizer)
        first.close()
        train(model, optimizer)
        optimizer.close()
        assert is_plain(model)
        return found, model

    expected = build()
    optimizer = torch.optim.SGD([parameter for _, parameter in parts(expected)[1]], lr=0.5)
    for _ in range(2):
        train(expected, optimizer)
    with warned() as messages:
        for found, model in on_threads(2, program, timeout=BOUND):
            assert set(found) == public(ZeroOptimizer)
            for name, message in found.items():
                assert message.startswith("RuntimeError: a newer ZeroOptimizer took over parameters of this one"), name
            assert_same_model(model, expected)
    assert messages == ["close(): a newer ZeroOptimizer took over parameters of this one, and keeps them"] * 2


@pytest.mark.parametrize("stage", rows([3], [0, 1, 2]))
def test_at_stage_3_nothing_is_taken_over_and_the_first_goes_on(stage: int) -> None:
    model = build()
    first = zero(model, solo())
    text = "belongs to another stage-3 optimizer, which holds the values: close() that one first"
    assert text in error_of(zero, model, solo(), stage)
    train(model, first)
    first.close()
    assert_same_model(model, plain())
    zero(model, solo(), stage).close()
