"""A step calls in Python, for each parameter, nothing but the arrival of its gradient: counts, not times."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

NEEDS_3_11 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="a comprehension is a call on Python 3.11")
pytestmark = [pytest.mark.contract, NEEDS_3_11]


class Scales(nn.Module):
    """Many parameters in one bucket, each used once."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(16) for _ in range(number))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([scale.mul(inputs).sum() for scale in self.scales]).sum()


def counted(stage: int, number: int) -> Counter[str]:
    """Return how often each function of the library is called in a step with a clip, on one of two ranks."""

    def program(transport: Transport) -> Counter[str]:
        model, calls = Scales(number), Counter[str]()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage, process_group=transport)

        def count(frame: FrameType, what: str, _: Any) -> None:
            module, code = str(frame.f_globals.get("__name__", "")), cast(Any, frame.f_code)
            if what == "call" and module.startswith("zero."):
                calls[code.co_qualname] += 1

        for profile in (None, count):  # the first step is another one
            sys.setprofile(profile)
            try:
                model(torch.ones(16)).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                sys.setprofile(None)
        return calls

    gc.collect()
    gc.disable()  # or calls to finalizers of earlier tests' objects would count
    try:
        return on_threads(2, program, timeout=60)[0]
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [1, 2])
def test_only_the_arrival_of_a_gradient_is_called_for_each_parameter(stage: int) -> None:
    few, many = counted(stage, 20), counted(stage, 60)
    assert many - few == {
        "_PostAccumulateHook.__call__": 40,
        "Reducer.gradient_ready": 40,
        "Bucket.take_gradient": 40,
        "GradAccumulator.add": 40,
    }
