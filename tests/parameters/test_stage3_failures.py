"""Stage 3 when ranks diverge, a rank fails, or an optimizer ends: every rank names the place in an error, in time."""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from collectives.backends.threads import Loopback
from zero import ZeroOptimizer

from ..support.plain import assert_same_bits, assert_same_model
from ..support.pool import GROUP_TIMEOUT, GlooPool
from ..support.warned import own
from .test_stage3_errors import INPUTS, error_of, is_plain, plain, train, zero
from .wrong_moments import Net, loss_of

Call = Callable[[Net, ZeroOptimizer], Any]


# -- ranks that diverge -----------------------------------------------------------------------------------------------


def forward(model: Net, optimizer: ZeroOptimizer) -> None:
    model(INPUTS)


def evaluate(model: Net, optimizer: ZeroOptimizer) -> None:
    with torch.no_grad():
        model(INPUTS)


def second_block(model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.zero_grad()
    model.blocks[1](INPUTS)


def nothing(model: Net, optimizer: ZeroOptimizer) -> None:
    pass


def clip(model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.clip_grad_norm_(1.0)


def step(model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.step()


def read_one(model: Net, optimizer: ZeroOptimizer) -> None:
    with optimizer.gathered(model.block(2).scalar):
        pass


def close(model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.close()


def check(model: Net, optimizer: ZeroOptimizer) -> None:
    optimizer.check_replicas()


def no_backward(model: Net, optimizer: ZeroOptimizer) -> None:
    loss_of(model, INPUTS)
    optimizer.step()


def backward(model: Net, optimizer: ZeroOptimizer) -> None:
    torch.autograd.backward(loss_of(model, INPUTS))


REST = 'gather of unit "the root\'s rest"'
PARTED: list[tuple[Call, Call, str, str]] = [
    (forward, step, REST, "step()"),
    (step, forward, "step()", REST),
    (forward, clip, REST, "clip_grad_norm_()"),
    (evaluate, step, REST, "step()"),
    (forward, second_block, REST, "gather of unit 'blocks.1'"),
    (second_block, read_one, "gather of unit 'blocks.1'", "gather of unit 'blocks.2'"),
    (forward, close, REST, "close()"),
    (forward, check, REST, "check_replicas()"),
    (backward, no_backward, "gather of unit 'blocks.1'", "step()"),
]


def parted(group: Any, rank: int, case: int, collective: str = "auto") -> tuple[str, str, list[str], float]:
    """Return a rank's error when another rank does something else, that of its next call, wrong values, and seconds."""
    model = Net()
    optimizer = zero(model, group, collective=collective)
    train(model, optimizer)
    begin = time.monotonic()
    found, then = error_of(PARTED[case][:2][rank], model, optimizer), error_of(forward, model, optimizer)
    wrong = wrong_values(model, steps=1)
    return found, then, wrong, time.monotonic() - begin


def assert_parted(results: list[tuple[str, str, list[str], float]], case: int) -> None:
    for found, then, wrong, seconds in results:
        for place in PARTED[case][2:]:
            assert place in found, found
        assert "all ranks of a group must make the same calls in the same order" in found
        assert "Did one rank alone evaluate, generate or save?" in found
        assert "synced_gpus=True" in found
        assert "this communicator is closed since an earlier failure" in then or "is released" in then
        assert wrong == []
        assert seconds < GROUP_TIMEOUT, "a message brought it, no time limit"


@pytest.mark.parametrize("case", range(len(PARTED)), ids=lambda n: "-".join(call.__name__ for call in PARTED[n][:2]))
@pytest.mark.by_default("forward-step", "forward-clip", "backward-no_backward")
def test_ranks_in_different_places_learn_of_both_at_once(case: int) -> None:
    found = on_threads(2, lambda transport: parted(transport, transport.rank, case), timeout=GROUP_TIMEOUT)
    assert_parted(found, case)


@pytest.mark.parametrize("case", [0, 3, 4, 8], ids=lambda n: "-".join(call.__name__ for call in PARTED[n][:2]))
def test_processes_in_different_places_learn_of_both_at_once(gloo: GlooPool, case: int) -> None:
    """Over the network, so that units are sent. Ranks that share memory need not be in the same place."""
    assert_parted(gloo.run(parted, case, "pairwise"), case)


def alone(group: Any, rank: int, enters: str) -> list[torch.Tensor]:
    """Return the parameters after a step of all ranks, and one in which only rank 0 has a gradient."""
    model = Net()
    optimizer = zero(model, group)
    train(model, optimizer)
    if rank == 0:
        torch.autograd.backward(loss_of(model, INPUTS))
    elif enters == "the model":
        loss_of(model, INPUTS)
    elif enters == "another unit":
        model.blocks[1](INPUTS)
    optimizer.step()
    with optimizer.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("enters", ["the model", "another unit", "nothing"])
def test_where_no_bytes_of_a_unit_travel_a_rank_without_a_backward_catches_up(gloo: GlooPool, enters: str) -> None:
    """Processes of one host read each other's slices, so that a gather on one of them needs nothing from the others."""
    model = plain(1)
    torch.autograd.backward(loss_of(model, INPUTS))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(2)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for found in gloo.run(alone, enters):
        for parameter, expected in zip(found, model.parameters(), strict=True):
            assert_same_bits(parameter, expected)


# -- ranks that differ where they may ----------------------------------------------------------------------------------


def generate(model: Net, optimizer: ZeroOptimizer) -> None:
    """Run forwards without gradients, of which each rank needs another number."""
    with torch.no_grad():
        for _ in range(1 + optimizer.rank):
            model(INPUTS)


def infer(model: Net, optimizer: ZeroOptimizer) -> None:
    with torch.inference_mode():
        for _ in range(1 + optimizer.rank):
            model(INPUTS)


def evaluate_alone(model: Net, optimizer: ZeroOptimizer) -> None:
    if optimizer.rank == 1:
        evaluate(model, optimizer)


def in_another_order(model: Net, optimizer: ZeroOptimizer) -> None:
    with torch.no_grad():
        for number in (1, 2) if optimizer.rank else (2, 1):
            model.blocks[number](INPUTS)


def save_alone(model: Net, optimizer: ZeroOptimizer) -> None:
    if optimizer.rank == 0:
        with optimizer.gathered():
            model.state_dict()


def evaluate_alike(model: Net, optimizer: ZeroOptimizer) -> None:
    for factor in (1, 2):
        evaluate(model, optimizer)
        with torch.inference_mode():
            model.blocks[1](INPUTS * factor * optimizer.rank)
    with optimizer.gathered(model.block(2).scalar):
        pass


def generate_in_gathered(model: Net, optimizer: ZeroOptimizer) -> None:
    with optimizer.gathered():
        generate(model, optimizer)


def evaluate_in_join(model: Net, optimizer: ZeroOptimizer) -> None:
    with optimizer.join():
        evaluate_alone(model, optimizer)
        if optimizer.rank == 1:
            optimizer.clip_grad_norm_(1.0)


DIFFERENT: list[Call] = [generate, infer, evaluate_alone, in_another_order, save_alone]
ALIKE: list[Call] = [evaluate_alike, generate_in_gathered, evaluate_in_join]


def warned_of(group: Any, rank: int, case: Call, calls: int, **arguments: Any) -> tuple[list[str], list[str]]:
    """Return the warnings of steps after ``calls`` of a case, and the parameters that are not the plain loop's."""
    model = Net()
    optimizer = zero(model, group, **arguments)
    train(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            case(model, optimizer)
            train(model, optimizer)
    wrong = wrong_values(model, steps=0)
    optimizer.close()
    expected = plain(1 + calls)
    wrong += [name for name, p in model.named_parameters() if not torch.equal(p, expected.get_parameter(name))]
    return [str(warning.message) for warning in own(caught)], wrong


@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.__name__)
@pytest.mark.by_default("generate", "infer", "save_alone")
def test_where_no_bytes_of_a_unit_travel_ranks_that_use_other_units_are_told_once_and_train_on(
    gloo: GlooPool, case: Call
) -> None:
    (told, wrong), *others = gloo.run(warned_of, case, 2)
    assert len(told) == 1
    assert told[0].startswith("before step(), ranks 0 and 1 have run different forwards without gradients")
    assert "Where units are gathered from other ranks it is an error" in told[0]
    assert "synced_gpus=True" in told[0]
    assert "optimizer.gathered()" in told[0]
    assert [wrong, *others] == [[], ([], [])]


@pytest.mark.parametrize("case", ALIKE, ids=lambda case: case.__name__)
def test_ranks_that_use_the_same_units_or_may_differ_everywhere_are_told_nothing(gloo: GlooPool, case: Call) -> None:
    assert gloo.run(warned_of, case, 2) == [([], [])] * 2


def replicas_differ(group: Any, rank: int) -> tuple[list[str], list[str]]:
    return warned_of(
        group,
        rank,
        lambda model, optimizer: [evaluate(model, optimizer) for _ in range(rank // 2)],
        1,
        sharding_factor=2,
    )


def test_only_ranks_that_share_a_copy_are_compared(gloo: GlooPool) -> None:
    assert gloo.run(replicas_differ, ranks=range(4)) == [([], [])] * 4


@pytest.mark.full
def test_a_unit_that_only_one_rank_enters_ends_with_the_time_limit_and_is_named() -> None:
    def program(transport: Transport) -> str:
        model = Net()
        optimizer = zero(model, transport)
        return error_of(evaluate, model, optimizer) if transport.rank == 0 else "nothing"

    message, other = on_threads(2, program, timeout=5)
    assert f"rank 0, in {REST}: no answer from rank 1 after " in message
    assert other == "nothing"


# -- a rank that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["send", "recv", "wait"])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, 14, 20, 29])
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
            raise

    with pytest.raises((OSError, RuntimeError)):
        Loopback[None](2, timeout=5, interfere=interfere).run(program)
    assert wrong == []
    assert told[1].startswith("OSError: the cable is broken")
    assert told[0].startswith(("PeerError: rank 0, in ", "MismatchError: rank 0 is in "))
    assert "this communicator is closed since an earlier failure" in told[0]


def wrong_values(model: nn.Module, steps: int) -> list[str]:
    """Return the parameters that neither have a value of the plain loop's first steps nor are released."""
    found = []
    for name, parameter in model.named_parameters():
        message = error_of(parameter.detach)
        known = (plain(n).get_parameter(name) for n in range(1, steps + 1))
        if f"'{name}' is released" not in message and not any(torch.equal(parameter, value) for value in known):
            found.append(name)
    return found


def test_close_after_a_failure_says_why_the_model_has_no_values() -> None:
    def program(transport: Transport) -> tuple[str, str, str, bool]:
        model = Net()
        optimizer = zero(model, transport)
        error_of(PARTED[0][:2][transport.rank], model, optimizer)
        found, again = error_of(optimizer.close), error_of(optimizer.close)
        called = error_of(optimizer.step)
        train_a_new_one(transport)
        return found, again, called, model._forward_pre_hooks == {}

    for found, again, called, unhooked in on_threads(2, program, timeout=5):
        assert "closed since an earlier failure" in found
        assert again == "nothing"
        assert "this optimizer is closed" in called
        assert "the model is plain again" not in called
        assert unhooked


def train_a_new_one(group: Any) -> None:
    """Train a new optimizer: the group itself is intact."""
    model = Net()
    optimizer = zero(model, group)
    train(model, optimizer)
    optimizer.close()
    assert_same_model(model, plain(1))


# -- calls at the wrong time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "where"),
    [(step, "gathered"), (step, "forward"), (step, "backward"), (close, "forward"), (close, "backward")],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_a_call_that_would_pull_the_rug_from_under_a_unit_is_refused(call: Call, where: str) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = Net()
        optimizer = zero(model, transport)
        found: list[str] = []

        def act(*_: Any) -> None:
            found.append(error_of(call, model, optimizer))

        loss = loss_of(model, INPUTS)
        if where == "gathered":
            with optimizer.gathered():
                act()
        elif where == "forward":
            with model.blocks[1].register_forward_pre_hook(act):
                loss = loss_of(model, INPUTS)
        else:
            with model.blocks[1].register_full_backward_hook(act):
                loss = loss_of(model, INPUTS)
                torch.autograd.backward(loss)
        optimizer.zero_grad()
        train(model, optimizer)
        optimizer.close()
        return found[0], model

    for message, model in on_threads(2, program, timeout=5):
        assert message.startswith("RuntimeError: ")
        assert f"inside {where}" in message or f"inside a {where}" in message
        assert_same_model(model, plain(1))


def test_where_torch_forbids_saved_tensor_hooks_a_forward_raises_and_nothing_is_stuck() -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = Net()
        optimizer = zero(model, transport)
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            message = error_of(forward, model, optimizer)
        train(model, optimizer)
        optimizer.close()
        return message, model

    for message, model in on_threads(2, program, timeout=5):
        assert message == "RuntimeError: no hooks here"
        assert_same_model(model, plain(1))


def test_a_sparse_gradient() -> None:
    def program(transport: Transport) -> tuple[str, nn.Embedding]:
        table = nn.Embedding(5, 3, sparse=True)
        nn.init.constant_(table.weight, 0.5)
        model = nn.Sequential(table)
        optimizer = zero(model, transport)
        message = error_of(lambda: torch.autograd.backward(model(torch.tensor([1])).sum()))
        optimizer.zero_grad()
        table.sparse = False
        torch.autograd.backward(model(torch.tensor([1])).sum())
        optimizer.step()
        optimizer.close()
        return message, table

    expected = torch.full((5, 3), 0.5)
    expected[1] = 0
    for message, table in on_threads(2, program, timeout=5):
        assert "the gradient of '0.weight' is torch.sparse_coo: sparse gradients are not supported" in message
        assert torch.equal(table.weight, expected)


# -- the end of an optimizer ------------------------------------------------------------------------------------------


def test_close_makes_the_model_plain_and_can_be_repeated() -> None:
    def program(transport: Transport) -> tuple[bool, list[str], nn.Module]:
        model = Net()
        optimizer = zero(model, transport)
        train(model, optimizer)
        optimizer.close()
        optimizer.close()
        left = is_plain(model)
        calls = (optimizer.step, optimizer.zero_grad, optimizer.describe, lambda: optimizer.gathered().__enter__())
        found = [error_of(call) for call in calls]
        train(model, torch.optim.SGD(model.parameters(), lr=0.5))
        return left, found, model

    for left, found, model in on_threads(2, program, timeout=5):
        assert left
        assert all("this optimizer is closed: the model is plain again" in message for message in found)
        assert_same_model(model, plain(2))


def test_an_optimizer_that_goes_without_close_takes_the_values_along_and_errors_say_so() -> None:
    def program(transport: Transport) -> tuple[list[str], nn.Module]:
        model = Net()
        optimizer = zero(model, transport)
        train(model, optimizer)
        loss, weight = loss_of(model, INPUTS), model.first.weight
        del optimizer
        gc.collect()
        found = [
            error_of(weight.sum),
            error_of(model, INPUTS),
            error_of(model.state_dict),
            error_of(torch.autograd.backward, loss),
        ]
        assert "belongs to another stage-3 optimizer" in error_of(zero, model, transport)
        model.load_state_dict(plain(1).state_dict(), assign=True)
        optimizer = zero(model, transport)
        train(model, optimizer)
        optimizer.close()
        return found, model

    for found, model in on_threads(2, program, timeout=5):
        assert all("optimizer that held this parameter's values is gone" in message for message in found[:3])
        assert "this graph belongs to an optimizer that is gone" in found[3]
        assert_same_model(model, plain(2))


def test_check_replicas_and_describe_say_what_they_say_at_any_stage() -> None:
    def program(transport: Transport, stage: int) -> tuple[str, str, dict[str, int]]:
        model = Net()
        optimizer = zero(model, transport, stage)
        train(model, optimizer)
        described = optimizer.describe()
        return optimizer.check_replicas(), str(described), described.bytes

    told = {stage: on_threads(2, functools.partial(program, stage=stage), timeout=5) for stage in (0, 3)}
    assert {sha for results in told.values() for sha, _, _ in results} == {told[0][0][0]}
    for rank, (_, text, sizes) in enumerate(told[3]):
        assert text.startswith(f"stage 3, rank {rank} of 2, collective pairwise")
        assert sizes["parameters"] < told[0][rank][2]["parameters"]
        assert all(f"{kind:<14} {size:>14,}" in text for kind, size in sizes.items())
