"""A step launches no more kernels on a device, and looks at its values no more often, than this table says.

Launches are counted without a device, as operators that touch elements, by the phase that issues them: one process
plays the last of 8 ranks, whose peers answer at once (`benchmarks.gpu_short.peers`). The library takes its paths for
devices, with its kernels as built for the CPU. The model has the tensors of Llama-7B's blocks, 1/32 as wide, and paths
work on blocks of elements that are smaller in proportion.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_short.peers import (
    NARROW,
    NARROWER,
    SEVEN_BILLION,
    answered,
    build,
    device_paths,
    join_fake_group,
    tokens,
)
from collectives import Transport
from zero import MixedPrecision, ZeroOptimizer
from zero.core.buckets import MIB, bucket_sizes

from .support.built_kernels import built_kernels, put_in

RANKS = 8
_VIEWS_AND_EMPTY = """
view as_strided slice select detach expand unbind transpose t alias split split_with_sizes chunk narrow flatten
unsqueeze squeeze permute reshape _reshape_alias _unsafe_view unfold set_ resize_ empty empty_strided empty_like
new_empty new_empty_strided lift_fresh is_same_size
"""
WITHOUT_KERNEL = frozenset(_VIEWS_AND_EMPTY.split())
LOOKS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"])
METHODS = ("tolist", "numpy", "cpu")  # look without one of these operators


@dataclass
class Counted:
    """A step. ``times``: of headers awaited ("rounds"), and of meetings and exchanges ("control")."""

    launches: Counter[str] = field(default_factory=Counter)  # beyond the model's, by operator and function
    looks: int = 0  # at values of a device
    times: Counter[str] = field(default_factory=Counter)

    def note(self, what: str) -> None:
        self.times[what] += 1


class _Operators(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name not in WITHOUT_KERNEL:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        """Note an operator, or a method of a tensor, if a function of the library has called it."""
        frame: Any = sys._getframe(2)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(("zero.", "collectives.")):
            frame = frame.f_back
        if frame is not None and (name in LOOKS or name in METHODS):
            self._counted.looks += 1
        elif frame is not None:
            self._counted.launches[f"{name} of {frame.f_code.co_qualname}"] += 1


def cap_of(stage: int) -> float:
    """Return the default size of a bucket on a device, in MiB of the narrow model; at stage 3 that of a narrow unit."""
    shape = NARROW if stage == 3 else SEVEN_BILLION
    model = build(shape, torch.device("meta"))
    sizes = bucket_sizes(
        None,
        "cuda",
        units_are_gathered=stage == 3,
        ranks=RANKS,
        world_size=RANKS,
        hosts=1,
        largest_unit=2 * sum(parameter.numel() for parameter in model.blocks[0].parameters()),
        total=2 * sum(parameter.numel() for parameter in model.parameters()),
    )
    return sizes.most / MIB * (1 if stage == 3 else NARROWER)


def count(stage: int, clip: bool) -> Counted:
    """Count the third step of a rank in bf16 with fp32 masters. The default process group is a fake one."""
    optimizer_of: Callable[..., ZeroOptimizer] = ZeroOptimizer
    model, batch = build(NARROW, torch.device("cpu")), tokens(NARROW, 4, torch.device("cpu"))
    optimizer = optimizer_of(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=answered(),
        collective="all_to_all",
        mixed_precision=MixedPrecision(torch.bfloat16),
        bucket_cap_mb=cap_of(stage),
        lr=1e-4,
        fused=True,
    )
    counted = Counted()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, noted in (
            (Transport, "announce", "rounds"),
            (Transport, "meet", "control"),
            (Transport, "exchange", "control"),
        ):
            patch.setattr(owner, name, _noting(getattr(owner, name), partial(counted.note, noted)))
        operators = _Operators(counted)
        kernels = built_kernels(operators.note)
        for name in METHODS:
            patch.setattr(Tensor, name, _noting(getattr(Tensor, name), partial(operators.note, name)))
        for _ in range(3):
            counted.__init__()  # type: ignore[misc]
            with operators, put_in(kernels):
                model(batch).backward()
                if clip:
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
    optimizer.close()
    return counted


def _noting(method: Callable[..., Any], noted: Callable[[], object]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        noted()
        return method(*given, **named)

    return call


@dataclass(frozen=True)
class Budget:
    """The most of each, with and without a clip. ``rounds``: of the gate, and of the first reduction of a round."""

    launches: tuple[int, int]
    looks: int
    rounds: int
    control: tuple[int, int] = (2, 1)


BUDGETS = {  # by stage, of all blocks; of the default sizes of buckets on a device: 9 buckets, at stage 3 5
    0: Budget(launches=(335, 329), looks=0, rounds=1),
    1: Budget(launches=(283, 277), looks=0, rounds=1),
    2: Budget(launches=(283, 277), looks=0, rounds=1),
    3: Budget(launches=(368, 362), looks=1, rounds=2),
}


@pytest.fixture(autouse=True)
def one_of_many() -> Iterator[None]:
    join_fake_group(RANKS)
    with device_paths():
        yield
    dist.destroy_process_group()


@pytest.mark.first(0)
@pytest.mark.parametrize(("clip", "stage"), product((True, False), BUDGETS))
def test_a_step_is_within_its_budget(clip: bool, stage: int) -> None:
    budget = BUDGETS[stage]
    counted = count(stage, clip)
    assert sum(counted.launches.values()) <= budget.launches[not clip], counted.launches
    assert any("clip" in name for name in counted.launches) is clip, "else nothing would be counted at all"
    assert counted.looks <= budget.looks
    assert counted.times["rounds"] <= budget.rounds
    assert counted.times["control"] <= budget.control[not clip]
