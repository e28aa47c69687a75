"""When ranks diverge, one fails or an optimizer is gone, every rank names the place in time; no value is wrong.

What is refused at construction, and calls at a wrong moment, are laws: see `tests/dials/units.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Loopback, Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.cases import manager_of
from ..support.errors import assert_in_order, error_of, warned
from ..support.limits import BOUND, at_once
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from .stage3 import INPUTS, Net, loss_of, on_ranks, plain, train, zero

pytestmark = [pytest.mark.law("exceptions"), pytest.mark.law("errors")]

Call = Callable[[Net, ZeroOptimizer], Any]


def evaluate(model: Net, optimizer: ZeroOptimizer) -> None:
    with torch.no_grad():
        model(INPUTS)


REST = 'gather of unit "the root\'s rest"'
PARTED: dict[str, tuple[Call, Call, str, str]] = {
    "forward, step": (lambda model, _: model(INPUTS), lambda _, optimizer: optimizer.step(), REST, "step()"),
    "step, evaluation": (lambda _, optimizer: optimizer.step(), evaluate, "step()", REST),
    "forward, a unit": (
        lambda model, _: model(INPUTS),
        lambda model, _: model.blocks[1](INPUTS),
        REST,
        "gather of unit 'blocks.1'",
    ),
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
    first, second, place, other = PARTED[name]

    def program(transport: Transport) -> tuple[str, str, list[str]]:
        model = Net()
        optimizer = zero(model, transport, collective="pairwise")
        train(model, optimizer)
        with at_once():
            found, then = error_of((first, second)[transport.rank], model, optimizer), error_of(model, INPUTS)
        return found, then, wrong_values(model, steps=1)

    for found, then, wrong in on_threads(2, program, timeout=4 * BOUND):
        remedies = "Did one rank alone evaluate, generate or save? … synced_gpus=True"
        assert place in found
        assert other in found
        assert_in_order(f"all ranks of a group must make the same calls in the same order … {remedies}", found)
        assert "this communicator is closed since an earlier failure" in then or "is released" in then
        assert wrong == []


@pytest.mark.parametrize(
    ("event", "after"),
    rows(
        [("send", 0), ("send", 14), ("recv", 5), ("recv", 20), ("wait", 9)],
        [("send", 5), ("send", 9), ("recv", 0), ("recv", 14), ("wait", 0), ("wait", 20)],
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
            told[transport.rank] = f"{type(error).__name__}: {error} {error_of(model, INPUTS)}"
            wrong.extend(wrong_values(model, steps=4))
            assert manager_of(optimizer).all_released()
            raise

    with pytest.raises((OSError, RuntimeError)):
        Loopback[None](2, timeout=BOUND, interfere=interfere).run(program)
    assert wrong == []
    assert told[1].startswith("OSError: the cable is broken")
    assert told[0].startswith(("PeerError: rank 0, in ", "MismatchError: rank 0 is in "))
    assert "this communicator is closed since an earlier failure" in told[0]


def in_another_order(model: Net, optimizer: ZeroOptimizer) -> None:
    """End with the same unit."""
    with torch.no_grad():
        for number in ([0, 1, 2], [1, 0, 2])[optimizer.rank]:
            model.block(number)(INPUTS)


def generate(model: Net, optimizer: ZeroOptimizer) -> None:
    """Run forwards without gradients, of which each rank needs another number."""
    with torch.inference_mode():
        for _ in range(1 + optimizer.rank):
            model(INPUTS)


def save_alone(model: Net, optimizer: ZeroOptimizer) -> None:
    with optimizer.gathered() if optimizer.rank == 0 else nullcontext():
        pass


def generate_in_gathered(model: Net, optimizer: ZeroOptimizer) -> None:
    with optimizer.gathered():
        generate(model, optimizer)


def evaluate_in_join(model: Net, optimizer: ZeroOptimizer) -> None:
    with optimizer.join():
        if optimizer.rank == 1:
            generate(model, optimizer)
            optimizer.clip_grad_norm_(1.0)


WARNED = {in_another_order: 1, generate: 1, save_alone: 1, generate_in_gathered: 0, evaluate_in_join: 0}
"""What the ranks do, and how many warnings there are of it."""


@pytest.mark.parametrize("act", WARNED, ids=lambda act: act.__name__)
def test_ranks_that_share_memory_and_use_other_units_without_gradients_are_told_once_and_train_on(act: Call) -> None:
    def twice(model: Net, optimizer: ZeroOptimizer) -> None:
        for _ in range(2):
            act(model, optimizer)
            train(model, optimizer)

    with warned() as messages:
        for _, model in on_ranks("common", twice):
            assert_same_model(model, plain(3))
    assert len(messages) == WARNED[act]
    for message in messages:
        assert message.startswith("before step(), ranks 0 and 1 have run different forwards without gradients")
        remedies = "rehearse that with collective='p … synced_gpus=True … optimizer.gathered()"
        assert_in_order(f"Where units are gathered from other ranks it is an error ({remedies}", message)


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
    """Also if a message has room only for the beginning of a unit's name, which is that of another one's, too."""
    name = "a_module_with_a_name_that_is_longer_than_the_label_of_any_message_can_be_"

    def program(transport: Transport) -> str:
        model = nn.ModuleDict({name + letter: nn.Linear(3, 3) for letter in "ab"})
        optimizer = zero(model, transport, collective="pairwise", units=lambda module: isinstance(module, nn.Linear))

        def act() -> None:
            with optimizer.join() if inside else nullcontext():
                loss_of(model[name + "ab"[transport.rank]], INPUTS)
                optimizer.step()

        return error_of(act)

    for found in on_threads(2, program, timeout=BOUND):
        assert ("inside join(), rank 0 calls gather()" if inside else "gather of unit 'a_module_with") in found
        assert "at stage 2 ranks may train different parts of the model" in found


def test_after_a_group_was_added_nothing_shows_or_uses_an_old_value() -> None:
    def program(transport: Transport) -> tuple[Tensor, list[str], nn.Module]:
        model = Net()
        optimizer = zero(list(model.blocks.parameters()), transport, module=model)
        train(model, optimizer)
        before = loss_of(model, INPUTS.clone().requires_grad_())  # so that its graph needs every weight
        optimizer.add_param_group({"params": list(model.first.parameters())})
        said = [error_of(torch.autograd.backward, before)]
        optimizer.zero_grad()
        loss = loss_of(model, INPUTS)
        with optimizer.gathered():
            view = model.block(1).weight.detach()
        optimizer.zero_grad()
        train(model, optimizer)
        seen = view.clone()
        said.append(error_of(torch.autograd.backward, loss))
        optimizer.check_replicas()
        optimizer.close()
        return seen, said, model

    expected = Net()
    train(expected, torch.optim.SGD(expected.blocks.parameters(), lr=0.5))
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.5))
    for seen, messages, model in on_threads(2, program, timeout=BOUND):
        assert bool(seen.isnan().all())
        assert "was laid out anew" in messages[0]
        assert "which this backward needs, was changed by a step" in messages[1]
        assert_same_model(model, expected)


def test_a_graph_from_before_the_optimizer_raises_or_has_the_plain_gradients() -> None:
    expected = torch.autograd.grad(loss_of(model := Net(), INPUTS), list(model.parameters()))

    def program(transport: Transport, collective: str) -> tuple[str, list[Tensor | None]]:
        model = Net()
        loss = loss_of(model, INPUTS)
        optimizer = zero(model, transport, collective=collective)
        message = error_of(torch.autograd.backward, loss)
        return message, [optimizer.full_grad(p) for p in model.parameters()] if message == "nothing" else []

    for message, _ in on_threads(2, lambda transport: program(transport, "pairwise")):
        assert "modified by an inplace operation" in message, "what is left of a released parameter is NaN"
    for one, other in zip(program(solo(), "auto")[1], expected, strict=True):
        assert one is not None
        assert_same_bits(one, other)
