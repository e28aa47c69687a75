"""When ranks diverge, one fails or an optimizer is gone, every rank names the place in time; no value is wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Loopback, Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.cases import manager_of
from ..support.errors import error_of, warned
from ..support.limits import BOUND, at_once
from ..support.plain import assert_same_model
from ..support.rows import rows
from .stage3 import INPUTS, Net, loss_of, on_ranks, plain, train, zero

pytestmark = [pytest.mark.law("exceptions"), pytest.mark.law("errors")]

Call = Callable[[Net, ZeroOptimizer], Any]
step, close = (lambda _, optimizer: optimizer.step()), (lambda _, optimizer: optimizer.close())


def forward(model: Net, optimizer: ZeroOptimizer) -> None:
    model(INPUTS)


def evaluate(model: Net, optimizer: ZeroOptimizer) -> None:
    with torch.no_grad():
        model(INPUTS)


def second_block(model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.zero_grad()
    model.blocks[1](INPUTS)


REST = 'gather of unit "the root\'s rest"'
PARTED: dict[str, tuple[Any, ...]] = {
    "forward, step": (forward, step, REST, "step()"),
    "step, evaluation": (step, evaluate, "step()", REST),
    "forward, a unit": (forward, second_block, REST, "gather of unit 'blocks.1'"),
    "forward, close": (forward, close, REST, "close()"),
}


def wrong_values(model: nn.Module, steps: int) -> list[str]:
    """Return the parameters that neither have a value of the plain loop's first steps nor are released."""
    found = []
    for name, parameter in model.named_parameters():
        message = error_of(parameter.detach)
        known = (plain(n).get_parameter(name) for n in range(1, steps + 1))
        if f"'{name}' is released" not in message and not any(torch.equal(parameter, value) for value in known):
            found.append(name)
    return found


@pytest.mark.parametrize("name", PARTED)
def test_ranks_in_different_places_learn_of_both_at_once(name: str) -> None:
    *calls, place, other = PARTED[name]

    def program(transport: Transport) -> tuple[str, str, list[str]]:
        model = Net()
        optimizer = zero(model, transport, collective="pairwise")
        train(model, optimizer)
        with at_once():
            found, then = error_of(calls[transport.rank], model, optimizer), error_of(forward, model, optimizer)
        return found, then, wrong_values(model, steps=1)

    for found, then, wrong in on_threads(2, program, timeout=4 * BOUND):
        assert place in found
        assert other in found
        assert "all ranks of a group must make the same calls in the same order" in found
        assert "Did one rank alone evaluate, generate or save?" in found
        assert "synced_gpus=True" in found
        assert "this communicator is closed since an earlier failure" in then or "is released" in then
        assert wrong == []


@pytest.mark.parametrize(
    ("event", "after"),
    rows(
        [("send", 0), ("send", 14), ("recv", 5), ("recv", 20), ("wait", 9)],
        [
            *(("send", after) for after in (5, 9, 20)),
            *(("recv", after) for after in (0, 9, 14)),
            *(("wait", after) for after in (0, 5, 14, 20)),
        ],
    ),
)
def test_a_rank_that_fails_in_a_collective_stops_every_rank_and_no_parameter_is_wrong(event: str, after: int) -> None:
    left = {"events": -1}
    told: dict[int, str] = {}
    wrong: list[str] = []

    def interfere(rank: int, what: str, peer: int) -> None:
        if rank == 1 and what == event and left["events"] >= 0:
            left["events"] -= 1
            if left["events"] < 0:
                raise OSError("the cable is broken")

    def program(transport: Transport) -> None:
        model = Net()
        optimizer = zero(model, transport)
        train(model, optimizer)
        if transport.rank == 1:
            left["events"] = after
        try:
            while True:
                train(model, optimizer)
        except (OSError, RuntimeError) as error:
            told[transport.rank] = f"{type(error).__name__}: {error} {error_of(forward, model, optimizer)}"
            wrong.extend(wrong_values(model, steps=4))
            wrong.extend(name for name, p in model.named_parameters() if "is released" not in error_of(p.detach))
            raise

    with pytest.raises((OSError, RuntimeError)):
        Loopback[None](2, timeout=BOUND, interfere=interfere).run(program)
    assert wrong == []
    assert told[1].startswith("OSError: the cable is broken")
    assert told[0].startswith(("PeerError: rank 0, in ", "MismatchError: rank 0 is in "))
    assert "this communicator is closed since an earlier failure" in told[0]


def test_a_forward_whose_gather_fails_leaves_nothing_gathered() -> None:
    armed: list[bool] = []

    def interfere(rank: int, event: str, peer: int) -> None:
        if rank == 1 and event == "send" and armed:
            armed.clear()
            raise OSError("the cable is broken")

    def program(transport: Transport) -> tuple[str, bool]:
        model = Net()
        optimizer = zero(model, transport)
        if transport.rank == 1:
            model.block(0).register_forward_pre_hook(lambda *_: armed.append(True))
        return error_of(forward, model, optimizer), manager_of(optimizer).all_released()

    for message, released in Loopback[tuple[str, bool]](2, timeout=BOUND, interfere=interfere).run(program):
        assert "the cable is broken" in message
        assert released


def test_ranks_that_share_memory_and_evaluate_apart_are_told_once() -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> None:
        for _ in range(2):
            if optimizer.rank:
                evaluate(model, optimizer)
            train(model, optimizer)

    with warned() as messages:
        for _, model in on_ranks("common", act):
            assert_same_model(model, plain(3))
    (message,) = messages
    assert message.startswith("before step(), ranks 0 and 1 have run different forwards without gradients")


def test_ranks_that_share_memory_are_told_of_units_used_in_another_order() -> None:
    """Also where all end with the same unit."""

    def act(model: Net, optimizer: ZeroOptimizer) -> None:
        with torch.no_grad():
            for number in ((0, 1, 2), (1, 0, 2))[optimizer.rank]:
                model.block(number)(INPUTS)

    with pytest.warns(RuntimeWarning, match="before step.., ranks 0 and 1 have run different forwards"):
        on_ranks("common", act)


def test_an_optimizer_that_goes_without_close_takes_the_values_along_and_errors_say_so() -> None:
    def program(transport: Transport) -> tuple[list[str], nn.Module]:
        model = Net()
        optimizer = zero(model, transport)
        train(model, optimizer)
        loss, weight = loss_of(model, INPUTS), model.first.weight
        del optimizer
        gc.collect()
        calls: list[Any] = [weight.sum, lambda: model(INPUTS), model.state_dict, lambda: torch.autograd.backward(loss)]
        found = [error_of(call) for call in calls]
        assert "belongs to another stage-3 optimizer" in error_of(zero, model, transport)
        model.load_state_dict(plain(1).state_dict(), assign=True)
        optimizer = zero(model, transport)
        train(model, optimizer)
        optimizer.close()
        return found, model

    for found, model in on_threads(2, program, timeout=2 * BOUND):
        assert all("optimizer that held this parameter's values is gone" in message for message in found[:3])
        assert "this graph belongs to an optimizer that is gone" in found[3]
        assert_same_model(model, plain(2))


@pytest.mark.parametrize("inside", [False, True], ids=["", "join"])
def test_ranks_that_use_other_units_learn_what_helps(inside: bool) -> None:
    def program(transport: Transport) -> str:
        model = Net()
        optimizer = zero(model, transport, collective="pairwise")

        def act() -> None:
            with optimizer.join() if inside else nullcontext():
                loss_of(model.block(transport.rank), INPUTS)

        return error_of(act)

    for found in on_threads(2, program, timeout=BOUND):
        assert ("inside join(), rank 0 calls gather()" if inside else "but rank ") in found
        assert "at stage 2 ranks may train different parts of the model" in found


def test_model_state_dict_names_first_the_call_that_returns_it() -> None:
    model = Net()
    optimizer = zero(model, solo())
    assert "to save, all ranks call optimizer.full_state_dict(to=0), which" in error_of(model.state_dict)
    optimizer.close()
