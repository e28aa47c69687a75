"""Processes that share memory and use other units are told once and train on; units inside units on processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from zero import ZeroOptimizer

from ...parameters.nested_units import ODD
from ...parameters.stage3 import INPUTS, Net, plain, train, zero
from ...parameters.views import plain_views, views_of_process
from ...support.by_module import by_kind
from ...support.devices import whole_program
from ...support.plain import assert_same_model
from ...support.pool import GlooPool
from ...support.programs import Program, compare
from ...support.warned import own


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


CASES = {generate: 1, save_alone: 1, generate_in_gathered: 0, evaluate_in_join: 0}
"""What the ranks do, and how many warnings rank 0 has of it."""


def warned_of(group: Any, rank: int, case: Callable[[Net, ZeroOptimizer], None]) -> list[str]:
    """Return the warnings of two steps after a case each."""
    model = Net()
    optimizer = zero(model, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            case(model, optimizer)
            train(model, optimizer)
    optimizer.close()
    assert_same_model(model, plain(2))
    return [str(warning.message) for warning in own(caught)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ranks_that_use_other_units_without_gradients_are_told_once_and_train_on(gloo: GlooPool, case: Any) -> None:
    told, other = gloo.run(warned_of, case)
    assert (len(told), other) == (CASES[case], [])
    for text in told:
        assert text.startswith("before step(), ranks 0 and 1 have run different forwards without gradients")
        assert "Where units are gathered from other ranks it is an error (rehearse that with collective='p" in text
        assert "synced_gpus=True" in text
        assert "optimizer.gathered()" in text


@pytest.mark.parametrize(
    "program",
    [
        Program(3, 3, collective="pairwise", units=ODD["inside units"]),
        Program(4, 3, collective="pairwise", sharding_factor=2, precision=by_kind, units=ODD["kept inside units"]),
        Program(2, 3, units=ODD["kept inside units"]),
    ],
    ids=["travel", "kept by two copies", "in common memory"],
)
def test_units_inside_units_have_the_plain_loops_bits_on_processes(gloo: GlooPool, program: Program) -> None:
    compare(program, gloo.run(whole_program, program, ranks=range(program.world_size)))


@pytest.mark.parametrize("collective", ["pairwise", "auto"])
def test_views_of_one_tensor_have_the_plain_loops_bits_on_processes(gloo: GlooPool, collective: str) -> None:
    expected = plain_views(3, 3)
    for model in gloo.run(views_of_process, collective, ranks=(0, 1, 2)):
        assert_same_model(model, expected)


def scripted_net(group: Any, rank: int, collective: str) -> Net:
    model: Any = torch.jit.script(Net())
    optimizer = zero(model, group, collective=collective)
    for _ in range(4):
        train(model, optimizer)
    optimizer.close()
    found = Net()
    found.load_state_dict(model.state_dict())
    return found


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("collective", ["auto", "pairwise"])
def test_a_script_module_is_one_unit_on_processes(gloo: GlooPool, collective: str) -> None:
    expected: Any = torch.jit.script(Net())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for _ in range(4):
        train(expected, optimizer)
    for model in gloo.run(scripted_net, collective):
        assert_same_model(model, expected)
