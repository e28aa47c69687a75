"""Counts what a step launches on a device, without one: operators that touch elements, by the phase that issues them.

One process plays the last of 8 ranks (`benchmarks.answered`), and the library is made to take its paths for devices.
The model has the tensors of Llama-7B's blocks, narrower; blocks and chunks of elements are narrower alike, so that a
step launches as many kernels as it would at 4,096.

`python -m tests.launches` prints the counts of all 32 blocks, by stage.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.answered import answered, join_fake_group
from benchmarks.llama import NARROW, SEVEN_BILLION, build, tokens
from zero import MixedPrecision, ZeroOptimizer
from zero.core import norm

RANKS = 8
NARROWER = (NARROW.width / SEVEN_BILLION.width) ** 2
DEVICE_BLOCK = 1 << 22
WITHOUT_KERNEL = frozenset(
    [
        "view",
        "as_strided",
        "slice",
        "select",
        "detach",
        "expand",
        "unbind",
        "transpose",
        "t",
        "alias",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "set_",
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "permute",
        "reshape",
        "_reshape_alias",
        "_unsafe_view",
        "unfold",
        "narrow",
        "chunk",
        "flatten",
        "lift_fresh",
        "resize_",
        "is_same_size",
    ]
)
LOOKS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"])
PHASES = {
    ("zero.parameters.gathered.gathers", "start"): "gather",
    ("zero.step.update", "_gather"): "gather",
    ("zero.runtime.accumulator", "gather_means"): "gather",
    ("zero.parameters.edit_detector", "compare"): "release",
    ("zero.parameters.edit_detector", "take"): "release",
    ("zero.runtime.accumulator", "flush"): "reduce",
    ("zero.runtime.accumulator", "_launch"): "reduce",
    ("zero.runtime.accumulator", "wait"): "reduce",
    ("zero.runtime.accumulator", "divide"): "divide",
    ("zero.step.update", "norm_part"): "clip",
    ("zero.step.update", "clip"): "clip",
    ("zero.step.update", "step"): "step",
}
ON_THE_HOST = {("zero.step.update", "clip")}  # reads the norm, which is in the host's memory


@dataclass
class Counted:
    """The launches and the looks of a step by phase, what else the library issued, and headers that were awaited."""

    launches: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        return sum(self.launches.values()) + sum(self.others.values())


class _Operators(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name not in WITHOUT_KERNEL:
            issued = _issued_by()
            if issued is not None:
                phase, function = issued
                of = self._counted.looks if name in LOOKS else self._counted.launches
                if name in LOOKS and function in ON_THE_HOST:
                    pass
                elif phase:
                    of[phase] += 1
                else:
                    self._counted.others[f"{name} of {'.'.join(function)}"] += 1
        return func(*args, **(kwargs or {}))


def _issued_by() -> tuple[str, tuple[str, str]] | None:
    """Return the phase and the innermost function of the library that is running; None if the model is."""
    frame: Any = sys._getframe(2)
    innermost = None
    while frame is not None:
        function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if function[0].startswith(("zero.", "collectives.")):
            innermost = innermost or function
            if function in PHASES:
                return PHASES[function], innermost
        frame = frame.f_back
    return None if innermost is None else ("", innermost)


@contextmanager
def device_paths() -> Iterator[None]:
    """Let the library take its paths for devices, on the CPU."""
    from collectives.algorithms import ordered_sum
    from zero.core import bits, layout
    from zero.gradients import grad_slots
    from zero.parameters import edit_detector
    from zero.runtime import master_weights

    made = norm._Reader.__init__

    def narrow(self: Any, dtype: torch.dtype, device: torch.device, norm_type: float) -> None:
        made(self, dtype, device, norm_type)
        self._tiles, self._chunk = 1, norm._TILE
        self._stage = torch.empty(self._chunk, dtype=dtype, device=device)
        shape = (1, self._block, norm._TILE // self._block)
        self._lanes = {1: norm._Lanes.over(torch.empty(shape, dtype=torch.float64, device=device))}

    patches = [
        mock.patch.object(m, "host_readable", lambda device: False)
        for m in (bits, edit_detector, grad_slots, master_weights)
    ]
    patches += [
        mock.patch.object(ordered_sum, "BLOCK", int(DEVICE_BLOCK * NARROWER)),
        mock.patch.object(layout, "slot_bytes", lambda device: 512),
        mock.patch.object(norm._Reader, "__init__", narrow),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def count(stage: int, *, clip: bool = True, layers: int = NARROW.layers, cap_mb: float = 1 << 20) -> Counted:
    shape = replace(NARROW, layers=layers)
    torch.set_num_threads(1)
    model = build(shape, torch.device("cpu"))
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=answered(),
        collective="all_to_all",
        mixed_precision=MixedPrecision(torch.bfloat16),
        bucket_cap_mb=cap_mb,
        lr=1e-4,
        fused=True,
    )
    batch = tokens(shape, 4, torch.device("cpu"))
    from collectives import Transport

    headers = []
    announce = Transport.announce

    def noted(self, tag):
        headers.append(tag)
        return announce(self, tag)

    for step in range(3):
        counted = Counted(buckets=len(optimizer._storage.buckets))
        headers.clear()
        with _Operators(counted), mock.patch.object(Transport, "announce", noted):
            model(batch).backward()
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        counted.rounds = len(headers)
    optimizer.close()
    return counted


if __name__ == "__main__":
    join_fake_group(RANKS)
    with device_paths():
        for stage in range(4):
            for cap in (25 * NARROWER, 256 * NARROWER, 1 << 20):
                c = count(stage, cap_mb=cap, clip=True)
                print(stage, cap, c.buckets, c.total, dict(c.launches), dict(c.looks), dict(c.others), c.rounds)
