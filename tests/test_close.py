"""`close()` after a failure, and an optimizer whose parameters a newer one has taken over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from .parameters.stage3 import error_of, is_plain, zero
from .support.plain import assert_same_model

pytestmark = pytest.mark.contract

SOME = pytest.mark.parametrize("stage", [0, 1, 2])
ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])
BATCH = torch.linspace(-1, 1, 8).view(2, 4)


def build() -> nn.Sequential:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.25 + number)
        nn.init.constant_(layer.bias, -0.5 * number)
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run a step. With equal batches, two ranks take the step of one."""
    dtype = next(model.parameters()).dtype
    (model(BATCH.to(dtype)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def layer(model: nn.Module, number: int) -> nn.Linear:
    found = model.get_submodule(str(number))
    assert isinstance(found, nn.Linear)
    return found


def tie(model: nn.Module) -> None:
    layer(model, 2).weight = layer(model, 0).weight


def replace(model: nn.Module) -> None:
    layer(model, 1).weight = nn.Parameter(torch.full((4, 4), 0.125))


def assign(model: nn.Module) -> None:
    layer(model, 1).weight.data = torch.full((4, 4), 0.125)


def widen(model: nn.Module) -> None:
    model.double()


def narrow(model: nn.Module) -> None:
    model.bfloat16()


@contextmanager
def told() -> Iterator[list[str]]:
    """Return the warnings of all ranks."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(warning.message) for warning in seen if issubclass(warning.category, RuntimeWarning)]


CHANGES: dict[Callable[[nn.Module], None], tuple[str, str]] = {
    tie: ("the module's '2.weight' was replaced", "; lost: the values that this optimizer gave '2.weight'"),
    replace: ("the module's '1.weight' was replaced", "; lost: the values that this optimizer gave '1.weight'"),
    assign: ("the memory of '1.weight' was replaced", "; lost: the values that this optimizer gave '1.weight'"),
    widen: ("is now torch.float64", "move and cast the model before that"),
    narrow: ("is now torch.bfloat16", "move and cast the model before that"),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("stage", "change"),
    [(stage, change) for stage in (0, 1, 2, 3) for change in CHANGES if stage < 3 or change in (tie, replace)],
)
@pytest.mark.by_default("1-replace-1", "0-assign-2", "3-tie-2")
def test_close_works_at_the_first_call_says_what_is_lost_and_another_optimizer_trains_on(
    stage: int, change: Callable[[nn.Module], None], world_size: int
) -> None:
    def program(transport: Transport) -> nn.Module:
        model = build()
        first = zero(model, transport, stage)
        train(model, first)
        change(model)
        assert "was replaced" in (message := error_of(first.step)) or "is now" in message
        first.close()
        assert is_plain(model)
        second = zero(model, transport, stage)
        train(model, second)
        second.close()
        return model

    plain = build()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    change(plain)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    with told() as messages:
        for model in on_threads(world_size, program, timeout=5):
            assert_same_model(model, plain)
    assert len(messages) == world_size
    problem, loss = CHANGES[change]
    for message in messages:
        assert message.startswith("close(): rank 0: ")
        assert problem in message
        assert message.endswith(loss)


@ALL
def test_what_one_rank_lost_is_told_on_every_rank(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = zero(model, transport, stage)
        train(model, optimizer)
        if transport.rank == 1:
            replace(model)
        optimizer.close()
        return model

    plain = build()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    with told() as messages:
        first, second = on_threads(2, program, timeout=5)
    assert len(messages) == 2
    assert all("close(): rank 1: the module's '1.weight' was replaced" in message for message in messages)
    assert_same_model(first, plain)
    replace(plain)
    assert_same_model(second, plain)


@ALL
def test_a_close_of_a_sound_model_says_nothing(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, stage)
        train(model, optimizer)
        optimizer.close()

    with told() as messages:
        on_threads(2, program, timeout=5)
    assert messages == []


# -- after a failure ---------------------------------------------------------------------------------------------------


def in_finally(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    try:
        raise KeyError("the user's own")
    finally:
        optimizer.close()


def in_with(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    with closing(optimizer):
        raise KeyError("the user's own")


def inside_join(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    with optimizer.join():
        in_finally(model, optimizer)


@ALL
@pytest.mark.parametrize("fail", [in_finally, in_with])
@pytest.mark.by_default("in_finally-1", "in_with-3")
def test_a_close_that_fails_never_hides_the_error_before_it(stage: int, fail: Callable[..., None]) -> None:
    """Rank 0 fails and closes while rank 1 continues: neither succeeds, and each gets the reason."""

    def program(transport: Transport) -> str:
        model = build()
        optimizer = zero(model, transport, stage)
        train(model, optimizer)
        if transport.rank == 1:
            return error_of(optimizer.step)
        message = error_of(fail, model, optimizer)
        assert "this optimizer is closed" in error_of(optimizer.step)
        return message

    with told() as messages:
        first, second = on_threads(2, program, timeout=5)
    assert first == 'KeyError: "the user\'s own"'
    assert "close()" in second
    assert "step()" in second
    (message,) = messages
    assert message.startswith("close() after KeyError: ")
    assert "step()" in message


@ALL
def test_where_all_ranks_fail_alike_close_gives_the_model_back_and_the_error_goes_on(stage: int) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = build()
        optimizer = zero(model, transport, stage)
        train(model, optimizer)
        return error_of(in_finally, model, optimizer), model

    plain = build()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    with told() as messages:
        for found, model in on_threads(2, program, timeout=5):
            assert found == 'KeyError: "the user\'s own"'
            assert is_plain(model)
            assert_same_model(model, plain)
    assert messages == []


@ALL
def test_an_error_inside_join_is_not_hidden_by_a_close_there(stage: int) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = build()
        optimizer = zero(model, transport, stage)
        message = error_of(inside_join, model, optimizer)
        train(model, optimizer)
        optimizer.close()
        return message, model

    plain = build()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    with told() as messages:
        for message, model in on_threads(2, program, timeout=5):
            assert "KeyError" in message
            assert_same_model(model, plain)
    assert len(messages) == 2
    assert all("close() after KeyError: close() inside a forward" in message for message in messages)


@ALL
def test_a_failure_of_the_ranks_is_the_error_and_a_close_after_it_is_quiet(stage: int) -> None:
    def program(transport: Transport) -> tuple[str, str]:
        model = build()
        optimizer = zero(model, transport, stage)

        def both() -> None:
            try:
                (optimizer.step if transport.rank else optimizer.check_replicas)()
            finally:
                optimizer.close()

        return error_of(both), error_of(optimizer.close)

    with told() as messages:
        for found, again in on_threads(2, program, timeout=5):
            assert "check_replicas()" in found
            assert "step()" in found
            assert "closed since an earlier failure" not in found
            assert again == "nothing"
    assert messages == []


@ALL
@pytest.mark.parametrize("loop", ["closing", "finally"])
@pytest.mark.by_default("closing-1", "closing-3")
def test_uneven_loaders_end_in_an_error_on_each_rank_and_no_warning(stage: int, loop: str) -> None:
    """The shorter loop's close() meets a call of the longer one."""

    def program(transport: Transport) -> str:
        model = build()
        optimizer = zero(model, transport, stage)

        def run() -> None:
            for _ in range(3 - transport.rank):
                train(model, optimizer)

        def closed() -> None:
            if loop == "closing":
                with closing(optimizer):
                    run()
            else:
                try:
                    run()
                finally:
                    optimizer.close()

        return error_of(closed)

    with told() as messages:
        for error in on_threads(2, program, timeout=5):
            assert "close()" in error
            assert "all ranks of a group must make the same calls" in error
            assert error.count("optimizer.join()") == 1
    assert messages == []


# -- taken over --------------------------------------------------------------------------------------------------------


def calls_of(optimizer: ZeroOptimizer, parameter: Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "step": optimizer.step,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "zero_grad": optimizer.zero_grad,
        "no_sync": optimizer.no_sync,
        "full_grad": lambda: optimizer.full_grad(parameter),
        "full_master": lambda: optimizer.full_master(parameter),
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
    facts = {"rank", "world_size", "traffic", "close", "state"}
    own = [base for base in cls.__mro__ if base not in torch.optim.Optimizer.__mro__]
    return {name for base in own for name in vars(base) if not name.startswith("_")} - facts


@pytest.mark.parametrize(
    ("newer", "which"),
    [*((newer, which) for newer in (0, 1, 2, 3) for which in ("all", "some")), (3, "others, of the same module")],
)
@SOME
@pytest.mark.by_default("1-3-others, of the same module", "2-0-some")
def test_every_call_of_the_older_names_the_takeover_and_its_close_leaves_the_newer_alone(
    stage: int, newer: int, which: str
) -> None:
    """At stage 3 a newer optimizer takes over all parameters of its module, listed or not."""

    def parts(model: nn.Module) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        named = list(model.named_parameters())
        return {"all": (named, named), "some": (named, named[2:])}.get(which, (named[:4], named[4:]))

    def program(transport: Transport) -> tuple[dict[str, str], nn.Module]:
        model = build()
        old, new = parts(model)
        older = zero(old, transport, stage, module=model)
        model(BATCH).square().mean().backward()
        model.zero_grad()
        optimizer = zero(new, transport, newer, module=model)
        found = {name: error_of(call) for name, call in calls_of(older, old[0][1]).items()}
        train(model, optimizer)
        older.close()
        train(model, optimizer)
        optimizer.close()
        assert is_plain(model)
        return found, model

    plain = build()
    optimizer = torch.optim.SGD([parameter for _, parameter in parts(plain)[1]], lr=0.5)
    for _ in range(2):
        train(plain, optimizer)
    with told() as messages:
        for found, model in on_threads(2, program, timeout=5):
            assert set(found) == public(ZeroOptimizer)
            for name, message in found.items():
                assert message.startswith("RuntimeError: a newer ZeroOptimizer took over parameters of this one"), name
            assert_same_model(model, plain)
    assert messages == ["close(): a newer ZeroOptimizer took over parameters of this one, and keeps them"] * 2


@ALL
def test_at_stage_3_nothing_is_taken_over_and_the_first_goes_on(stage: int) -> None:
    model = build()
    first = zero(model, solo())
    assert "belongs to another stage-3 optimizer, which holds the values: close() that one first" in error_of(
        zero, model, solo(), stage
    )
    train(model, first)
    plain = build()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    first.close()
    assert_same_model(model, plain)
    zero(model, solo(), stage).close()
