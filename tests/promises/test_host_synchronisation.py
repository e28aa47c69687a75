"""Inside a step the host reads values of an accelerator only at places with a comment that says why.

Otherwise the host would not run ahead of the device. There is no accelerator here. Every tensor is on the CPU, the
library is made to believe that the host cannot read values at once, and all calls that would block the host are
recorded: operators that need a value, and methods that bring one into Python.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer

from ..support.built_kernels import built_kernels, put_in
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.programs import locked_build
from ..support.rows import rows

pytestmark = pytest.mark.law("host synchronisation")

OPERATORS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}
METHODS = ("tolist", "numpy", "cpu", "__array__", "item")  # methods that use none of these operators, or bypass them
ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
NAMED = "host synchronisation"


def where() -> list[str]:
    """Return the source of the innermost function of the library that is running.

    Return nothing if it reads a message, which is in the host's memory.
    """
    frame = sys._getframe()
    while (package := frame.f_globals.get("__name__", "").split(".")[0]) not in ("zero", "collectives"):
        assert frame.f_back is not None, "not the library's doing"
        frame = frame.f_back
    return [inspect.getsource(frame.f_code)] if package == "zero" else []


class Operators(TorchDispatchMode):
    def __init__(self, looks: list[str]) -> None:
        super().__init__()
        self._looks = looks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in OPERATORS:
            self._looks += where()
        return func(*args, **(kwargs or {}))


NOTES = threading.local()  # for each rank


@contextmanager
def noted(looks: list[str]) -> Iterator[None]:
    NOTES.looks = looks
    with Operators(looks):
        yield
    del NOTES.looks


@pytest.fixture(autouse=True)
def methods_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if hasattr(NOTES, "looks"):
                NOTES.looks += where()
            return method(*given, **named)

        return call

    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))


Act = Callable[[nn.Module, ZeroOptimizer, Any], None]


def backward(model: nn.Module, optimizer: ZeroOptimizer, batch: Any) -> None:
    odd_loss(model, batch).backward()


def pending(model: nn.Module, optimizer: ZeroOptimizer, batch: Any) -> None:
    with optimizer.no_sync():
        odd_loss(model, batch).backward()


def clip(model: nn.Module, optimizer: ZeroOptimizer, batch: Any) -> None:
    optimizer.clip_grad_norm_(0.1)


def scaled(model: nn.Module, optimizer: ZeroOptimizer, batch: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(odd_loss(model, batch)).backward()
    scaler.unscale_(optimizer)


def looks_of_a_step(
    transport: Transport, stage: int, acts: tuple[Act, ...], steps: int, precision: MixedPrecision | None = None
) -> list[list[str]]:
    """Return for each step the places that read values.

    The optimizer is fused: torch's other paths read step counts, on the host.
    """
    model = locked_build(0)
    arguments: dict[str, Any] = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.0005}
    arguments |= {"lr": 1e-2, "fused": True, "mixed_precision": precision}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **arguments)
    found = []
    for step in range(steps):
        batch = odd_batches(1, step)[0]  # the same parameters in every step
        with noted(looks := []):
            for act in acts:
                act(model, optimizer, batch)
            optimizer.step()
            optimizer.zero_grad()
        found.append(looks)
    return found


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("stage", rows([2], [0, 1, 3]))
def test_a_step_of_one_rank_looks_at_no_value_but_where_it_says_so(stage: int) -> None:
    def looks(*acts: Act) -> list[list[str]]:
        (found,) = on_threads(1, lambda transport: looks_of_a_step(transport, stage, acts, 3))
        assert all(NAMED in look.lower() for step in found for look in step), found
        return found

    assert looks(backward) == looks(pending, backward) == [[]] * 3
    means = 1 if stage == 0 else 0  # one for all
    assert [len(step) for step in looks(backward, backward)] == [means] * 3
    clipped = looks(backward, clip)
    assert [sum("_add_unread" in look for look in step) for step in clipped] == [1] * 3
    with put_in(built_kernels()):
        assert [len(step) for step in looks(backward, clip)] == [means] * 3


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("stage", rows([3], [0, 1, 2]))
def test_a_step_in_mixed_precision_looks_at_nothing_and_one_with_a_scaler_at_the_scale(stage: int) -> None:
    """Masters are updated without a read. Ranks compare the scale, and agree whether all gradients are finite."""

    def looks(act: Act, precision: MixedPrecision | None) -> list[list[str]]:
        return on_threads(1, lambda transport: looks_of_a_step(transport, stage, (act,), 2, precision))[0]

    for precision in PRECISIONS.values():
        assert looks(backward, precision) == [[], []]
    for chosen in (None, PRECISIONS["fp16"]):
        found = looks(scaled, chosen)
        assert all(NAMED in look.lower() for step in found for look in step), found
        shown = stage == 0 and chosen is None  # p.grad is real, and the scaler unscales it by itself
        assert [len(step) for step in found] == [0 if shown else 2] * 2


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("stage", rows([2], [0, 1, 3]))
def test_a_step_of_two_ranks_looks_once_for_all_units(stage: int) -> None:
    expected = [1 if stage == 3 else 0] * 2
    found = on_threads(2, lambda transport: looks_of_a_step(transport, stage, (backward, backward)[stage == 0 :], 2))
    for steps in found:
        assert [len(step) for step in steps] == expected
        assert all(NAMED in look.lower() for step in steps for look in step), steps


def test_what_is_seen_at_once_is_looked_at_at_once_and_noted() -> None:
    """The control: on the CPU the library searches for edits when it releases a unit, which is recorded as a read."""
    for steps in on_threads(2, lambda transport: looks_of_a_step(transport, 3, (backward,), 2)):
        assert all(sum("def same_bits" in look for look in step) > 4 for step in steps)
