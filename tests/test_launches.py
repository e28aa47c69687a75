"""A step launches no more kernels on a device, and looks at its values no more often, than this table says.

Launches are what a host has to do for each unit and each bucket, whatever its size, and on GPUs they decide the time of
a step. They are counted without a device, as operators that touch elements, by the phase that issues them: one process
plays the last of 8 ranks, whose peers answer at once (`benchmarks.gpu_short.peers`). The library takes its paths for
devices, with its kernels as built for the CPU (`support.built_kernels`). The model has the tensors of Llama-7B's
blocks, 1/32 as wide. Blocks of elements that a path works on at a time are smaller in proportion, so that a step
launches what it would at full width.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
    TINY,
    AnsweredBackend,
    Llama,
    answered,
    build,
    device_paths,
    join_fake_group,
    tokens,
)
from collectives import Transport
from zero import MixedPrecision, ZeroOptimizer
from zero.core.buckets import MIB, bucket_sizes
from zero.parameters.edit_detector import EditDetector

from .support.built_kernels import built_kernels, put_in
from .support.rows import only

RANKS = 8
_VIEWS_AND_EMPTY = """
view as_strided slice select detach expand unbind transpose t alias split split_with_sizes chunk narrow flatten
unsqueeze squeeze permute reshape _reshape_alias _unsafe_view unfold set_ resize_ empty empty_strided empty_like
new_empty new_empty_strided lift_fresh is_same_size
"""
WITHOUT_KERNEL = frozenset(_VIEWS_AND_EMPTY.split())
LOOKS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"])
METHODS = ("tolist", "numpy", "cpu")  # look without one of these operators
GATHER, REDUCTIONS = "_allgather_base_", ("alltoall_base_", "_reduce_scatter_base_")
PHASES = {  # of the innermost function on the stack that is one of these
    ("zero.parameters.gathered.units", "_start"): "gather",
    ("zero.step.update", "_gather"): "gather",
    ("zero.runtime.accumulator", "gather_means"): "gather",
    ("zero.parameters.edit_detector", "compare"): "release",
    ("zero.parameters.edit_detector", "take"): "release",
    ("zero.runtime.accumulator", "flush"): "reduce",
    ("zero.runtime.accumulator", "_launch"): "reduce",
    ("collectives.algorithms.ordered_sum", "ordered_sum"): "reduce",
    ("zero.gradients.reducer", "divide"): "divide",
    ("zero.step.update", "norm_part"): "clip",
    ("zero.step.update", "clip"): "clip",
    ("zero.step.update", "step"): "step",
}


@dataclass
class Counted:
    """A step: launches by phase and those outside all phases, looks at values of a device by phase, and how often units
    or buckets were gathered, released and reduced, headers awaited ("rounds"), and meetings and exchanges held
    ("control")."""

    launches: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)

    def note(self, what: str) -> None:
        self.times[what] += 1

    @property
    def total(self) -> int:
        """The launches beyond the model's."""
        return sum(self.launches.values()) + sum(self.others.values())


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
        """Note an operator, or a method of a tensor."""
        counted, (phase, function) = self._counted, _issued_by()
        if not function[0]:
            return
        if name in LOOKS or name in METHODS:
            counted.looks[phase] += 1
        elif phase:
            counted.launches[phase] += 1
            counted.times["gather"] += (phase, name) == ("gather", GATHER)
            counted.times["reduce"] += phase == "reduce" and name in REDUCTIONS
        else:
            counted.others[f"{name} of {'.'.join(function)}"] += 1


def _issued_by() -> tuple[str, tuple[str, str]]:
    """Return the phase, and the innermost function of the library that is running; empty if there is none."""
    frame: Any = sys._getframe(3)
    innermost = ("", "")
    while frame is not None:
        function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if function[0].startswith(("zero.", "collectives.")):
            innermost = innermost if innermost[0] else function
            if function in PHASES:
                return PHASES[function], innermost
        frame = frame.f_back
    return "", innermost


def cap_of(stage: int) -> float:
    """Return the default size of a bucket on a device, in MiB of the narrow model; at stage 3 that of a narrow unit."""
    shape = NARROW if stage == 3 else SEVEN_BILLION
    model = build(shape, torch.device("meta"))
    sizes = bucket_sizes(
        None,
        "cuda",
        units_are_gathered=stage == 3,
        ranks=RANKS,
        hosts=1,
        largest_unit=2 * sum(parameter.numel() for parameter in model.blocks[0].parameters()),
        total=2 * sum(parameter.numel() for parameter in model.parameters()),
    )
    return sizes.most / MIB * (1 if stage == 3 else NARROWER)


def count(
    stage: int, cap_mb: float, *, clip: bool = True, shape: Llama = NARROW, collective: str = "all_to_all"
) -> Counted:
    """Count the third step of a rank in bf16 with fp32 masters. The default process group is a fake one."""
    optimizer_of: Callable[..., ZeroOptimizer] = ZeroOptimizer
    model, batch = build(shape, torch.device("cpu")), tokens(shape, 4, torch.device("cpu"))
    optimizer = optimizer_of(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=answered(),
        collective=collective,
        mixed_precision=MixedPrecision(torch.bfloat16),
        bucket_cap_mb=cap_mb,
        lr=1e-4,
        fused=True,
    )
    counted = Counted()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, noted in (
            (Transport, "announce", "rounds"),
            (Transport, "meet", "control"),
            (Transport, "exchange", "control"),
            (EditDetector, "compare", "release"),
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


# -- budgets -----------------------------------------------------------------------------------------------------------

SHAPE = replace(NARROW, layers=4)


@dataclass(frozen=True)
class Budget:
    """The most launches of one gather, one release and one reduction, and of all divisions, clips and steps together.

    ``looks``: at values of the device, ``rounds``: headers of collectives (of the gate, and of the first reduction of a
    round), ``control``: meetings and exchanges; each with and without a clip.
    """

    gather: int
    release: int
    reduce: int
    divide: int
    clip: int
    step: int
    looks: tuple[int, int]
    rounds: tuple[int, int]
    control: tuple[int, int] = (2, 1)


BUDGETS = {  # by stage; of the default sizes of buckets on a device: 9 buckets, at stage 3 5
    0: Budget(gather=2, release=0, reduce=3, divide=0, clip=6, step=4, looks=(0, 0), rounds=(1, 1)),
    1: Budget(gather=1, release=0, reduce=3, divide=1, clip=6, step=16, looks=(0, 0), rounds=(1, 1)),
    2: Budget(gather=1, release=0, reduce=3, divide=1, clip=6, step=16, looks=(0, 0), rounds=(1, 1)),
    3: Budget(gather=2, release=2, reduce=3, divide=1, clip=6, step=2, looks=(1, 1), rounds=(2, 2)),
}


@pytest.fixture(params=[RANKS], ids=str, autouse=True)
def one_of_many(request: pytest.FixtureRequest) -> Iterator[None]:
    join_fake_group(request.param)
    with device_paths():
        yield
    dist.destroy_process_group()


def of_each(counted: Counted, phase: str) -> float:
    return counted.launches[phase] / max(1, counted.times[phase])


@pytest.mark.parametrize(("clip", "stage"), only(product((True, False), BUDGETS), (True, 3), (False, 2)))
def test_a_step_is_within_its_budget(clip: bool, stage: int) -> None:
    budget = BUDGETS[stage]
    counted = count(stage, cap_of(stage), clip=clip, shape=SHAPE)
    assert counted.others == {}, "launches of no phase"
    for phase in ("gather", "release", "reduce"):
        assert of_each(counted, phase) <= getattr(budget, phase), phase
    for phase in ("divide", "clip", "step"):
        assert counted.launches[phase] <= getattr(budget, phase), phase
    assert (counted.launches["clip"] > 0) is clip, "else nothing would be counted at all"
    assert sum(counted.looks.values()) <= budget.looks[not clip]
    assert counted.times["rounds"] <= budget.rounds[not clip]
    assert counted.times["control"] <= budget.control[not clip]


@pytest.mark.parametrize("stage", only(BUDGETS, 3))
def test_a_step_of_all_blocks_launches_at_most_450_kernels_beyond_the_models(stage: int) -> None:
    assert count(stage, cap_of(stage)).total <= 450


@pytest.mark.parametrize("one_of_many", [6, 8, 16], indirect=True, ids=str)
@pytest.mark.parametrize("stage", only((2, 3), 3))
def test_shards_are_even_so_that_collectives_read_and_write_buckets_in_place(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`native` launches the copy into the bucket, the reduction, and the cast of its sum; nothing is padded. An
    all-to-all has no sizes of parts."""
    counted = count(stage, cap_of(stage), clip=False, shape=TINY, collective="native")
    assert of_each(counted, "reduce") <= 3
    assert of_each(counted, "gather") <= BUDGETS[stage].gather
    exchange, sizes = AnsweredBackend.all_to_all, list[object]()

    def noted(*given: Any) -> Any:
        sizes.append(given[-1])
        return exchange(*given)

    monkeypatch.setattr(AnsweredBackend, "all_to_all", noted)
    count(stage, cap_of(stage), clip=False, shape=TINY)
    assert sizes
    assert not any(sizes)
