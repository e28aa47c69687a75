"""On an accelerator, streams wait for each other, captures and several devices are refused: tested without one.

Devices are device strings here, and streams record their waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer
from zero.core.layout import Dtypes, ParameterSpec
from zero.core.parameter_specs import check_one_device
from zero.runtime import streams
from zero.runtime.streams import Streams
from zero.step.throwaway import Setting
from zero.step.trial import placed

from ..support.errors import error_of
from ..support.plain import assert_same_model
from ..support.pool import SIZE, GlooPool
from ..support.rows import rows
from .stage3 import INPUTS, Net, loss_of, plain, train, zero

GPU = torch.device("cuda", 1)


def spec(name: str, device: str, trainable: bool = True) -> ParameterSpec:
    return ParameterSpec((name,), (2,), (1,), Dtypes.all(torch.float32), device, trainable, 0, 0)


def test_what_is_trained_on_two_devices_is_refused_before_anything_moves() -> None:
    def program(transport: Transport) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
        message = error_of(zero, model, transport)
        assert model[1].weight.is_meta
        return message

    with mock.patch("zero.config.Config.default_device", return_value=GPU):
        messages = on_threads(2, program, timeout=20)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = zero(list(model[0].parameters()), solo(), module=model)
    added = list(model[1].parameters())[:1]
    other = replace(spec("1.weight", "cuda:1"), group=1)
    with mock.patch("zero.setup.specs", return_value=[added, [other]]):
        messages.append(error_of(optimizer.add_param_group, {"params": added}))
    assert len(optimizer.param_groups) == 1
    check_one_device([spec("mask", "cpu", trainable=False), spec("a", "cuda:0"), spec("b", "cuda:0")], "now")
    for message in messages:
        assert "ValueError: '0.weight' is on cpu and '1.weight' on cuda:1" in message.replace("rank 0: ", "")
        assert message.endswith("would gather units in an order that differs between ranks")


_HERE = threading.local()  # the current stream of each rank, which is a thread, and whether it captures


class Stream:
    """A stream that records for which streams it waits."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: Stream) -> None:
        self._waits.append((self.name, other.name))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that parameters are on a GPU."""
    monkeypatch.setattr(Streams, "use", lambda self, devices: self._last.setdefault(GPU))
    monkeypatch.setattr(streams, "_current", lambda device: _HERE.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(streams, "_is_recorded", lambda device: getattr(_HERE, "captures", False))


ACTS: dict[str, Callable[[nn.Module, ZeroOptimizer], Any]] = {
    "backward": lambda model, _: loss_of(model, INPUTS).backward(),
    "step": lambda _, optimizer: optimizer.step(),
    "clip": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "forward": lambda model, _: model(INPUTS),
}


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(("act", "stage"), rows(zip(ACTS, (0, 1, 2, 0, 1), strict=True), ((act, 3) for act in ACTS)))
def test_a_capture_is_refused_and_training_goes_on(act: str, stage: int) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        waits: list[tuple[str, str]] = []
        one, _HERE.current = [Stream("one", [])] * 2
        model = Net()
        optimizer = zero(model, transport, stage)
        if act in ("step", "clip", "zero_grad"):
            loss_of(model, INPUTS).backward()
        _HERE.current, _HERE.captures = Stream("captured", waits), True
        message = error_of(ACTS[act], model, optimizer)
        _HERE.current, _HERE.captures = one, False
        assert waits == [], "CUDA ends a capture that waits for a stream outside it"
        optimizer.zero_grad()
        train(model, optimizer)
        optimizer.close()
        return message, model

    for message, model in on_threads(2, program, timeout=20):
        if act == "forward" and stage < 3:
            assert message == "nothing", "which runs nothing of the library"
        else:
            assert message.startswith("RuntimeError: a CUDA graph is being captured: ")
            assert message.endswith("outside torch.cuda.graph()")
        assert_same_model(model, plain(1))


def lands(group: dist.ProcessGroup | None, backend: str, context: Any) -> str:
    """Return the device on which the optimizer places a model from the meta device, on a machine with a second GPU."""
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    backends = "collectives.backends.gloo._device_backend"
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda")),
        mock.patch("torch.accelerator.current_device_index", return_value=1),
        mock.patch(backends, lambda _, device: {"cpu": "gloo"}.get(device.type, backend)),
        mock.patch("zero.setup.build_collective", side_effect=ZeroDivisionError) as told_of,
        context,
    ):
        assert error_of(ZeroOptimizer, model, process_group=group) == "ZeroDivisionError: "
    return str(told_of.call_args.args[2])


def everywhere(group: dist.ProcessGroup, rank: int) -> list[str]:
    settings = [("nccl", nullcontext()), ("gloo", nullcontext()), ("nccl", torch.device("cpu"))]
    return [lands(each, backend, context) for each in (group, None) for backend, context in settings]


def test_a_model_without_memory_lands_on_the_accelerator_that_nccl_serves(gloo: GlooPool) -> None:
    """Unless a default device was set, even the CPU. If only gloo is available, it is placed on the CPU."""
    for found in gloo.run(everywhere, ranks=range(SIZE)):
        assert found == ["cuda:1", "cpu", "cpu"] * 2


def test_on_a_device_a_class_is_tried_on_lengths_that_are_no_multiple_of_four() -> None:
    """As a whole; its first half is such a multiple, as all pieces are that end at a cut."""
    setting = Setting(0, Dtypes.all(torch.float32), torch.device("cuda"), ((3,),))
    lengths = [shape[0] for _, shape in placed([setting], [1])]
    assert any(length % 4 for length in lengths)
