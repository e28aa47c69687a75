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
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.built_kernels import built_kernels, put_in
from ..support.models import build, odd_batches, odd_loss
from ..support.narrowed import PRECISIONS

pytestmark = pytest.mark.law("host synchronisation")

OPERATORS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}
METHODS = ("tolist", "numpy", "cpu", "__array__", "item")  # methods that use none of these operators, or bypass them
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


def looks_of_a_step(transport: Transport, stage: int, acts: tuple[Act, ...], precision: Any = None) -> list[list[str]]:
    """Return for each of two steps the places that read values.

    The optimizer is fused: torch's other paths read step counts, on the host.
    """
    model = build()
    arguments: dict[str, Any] = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.0005}
    arguments |= {"lr": 1e-2, "fused": True, "mixed_precision": precision}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **arguments)
    found = []
    for step in range(2):
        batch = odd_batches(1, step)[0]  # the same parameters in every step
        with noted(looks := []):
            for act in acts:
                act(model, optimizer, batch)
            optimizer.step()
            optimizer.zero_grad()
        found.append(looks)
    return found


CASES: dict[str, tuple[int, tuple[Act, ...], Any, tuple[int, ...]]] = {  # ranks, and the looks of a step at each stage
    "a backward": (1, (backward,), None, (0, 0, 0, 0)),
    "no sync": (1, (pending, backward), None, (0, 0, 0, 0)),
    "two backwards": (1, (backward, backward), None, (1, 0, 0, 0)),  # one for the means of all
    **{name: (1, (backward,), precision, (0, 0, 0, 0)) for name, precision in PRECISIONS.items()},  # with masters
    "a scaler": (1, (scaled,), None, (0, 2, 2, 2)),  # of the ranks' scale, and of whether all gradients are finite
    "a scaler, fp16": (1, (scaled,), PRECISIONS["fp16"], (2, 2, 2, 2)),
    "two ranks": (2, (backward,), None, (0, 0, 0, 1)),  # once for all units
    "two ranks, two backwards": (2, (backward, backward), None, (1, 0, 0, 1)),
    "a clip": (1, (backward, clip), None, (1, 0, 0, 0)),
}


@pytest.mark.first(0)
@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("stage", range(4))
def test_a_step_looks_at_no_value_but_where_it_says_so(stage: int) -> None:
    for case, (ranks, acts, precision, counts) in CASES.items():
        with put_in(built_kernels()) if clip in acts else nullcontext():
            found = on_threads(ranks, partial(looks_of_a_step, stage=stage, acts=acts, precision=precision))
        for steps in found:
            assert all(NAMED in look.lower() for step in steps for look in step), case
            assert [len(step) for step in steps] == [counts[stage]] * 2, case
    (clipped,) = on_threads(1, lambda transport: looks_of_a_step(transport, stage, (backward, clip)))
    assert [sum("_add_unread" in look for look in step) for step in clipped] == [1] * 2, "without built kernels"


def test_what_is_seen_at_once_is_looked_at_at_once_and_noted() -> None:
    """The control: on the CPU the library searches for edits when it releases a unit, which is recorded as a read."""
    for steps in on_threads(2, lambda transport: looks_of_a_step(transport, 3, (backward,))):
        assert all(sum("def same_bits" in look for look in step) > 4 for step in steps)
