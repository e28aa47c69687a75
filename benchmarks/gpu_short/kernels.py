"""Section a, its second part: the library's kernels beside torch's operators, on one large tensor.

Knows: what a kernel reads and writes, and which operators give the same bits. Does not know: a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from collectives.algorithms.ordered_sum import ordered_sum
from collectives.kernels import FOUND, LIMBS, DeviceKernels, kernels_of
from collectives.kernels.self_check import plain_follow, same
from zero.core.norm import PowerSum
from zero.step.clip import clip_factor

from .clock import Host, clock
from .job import Row, ShortJob
from .one_rank import timed

NUMEL, QUICK_NUMEL = 1 << 27, 1 << 12
RANKS = 8
SMALL = 2.0**-30  # beside one: a factor that changes no value much, however often it is applied


def measure(job: ShortJob) -> Iterator[Row]:
    """Yield how long the kernels took to compile and to be checked, and a row for each; none where there are none."""
    timer, begin = clock(job.device), time.perf_counter()
    kernels = kernels_of(timer.device)
    timer.finish()
    if kernels is None:
        return
    yield {"compiled": time.perf_counter() - begin}
    torch.manual_seed(0)
    numel = QUICK_NUMEL if job.quick else NUMEL
    for case in (_sum, _norm, _scale, _follow):
        yield case(kernels, timer, numel)


def _row(
    timer: Host, name: str, moved: int, equal: bool, ours: Callable[[], object], theirs: Callable[[], object]
) -> Row:
    """``moved``: bytes that the kernel reads and writes. ``equal``: whether both gave the same bits."""
    (device, host), (operators, _) = timed(timer, ours), timed(timer, theirs)
    return {
        "compared": name,
        "equal": equal,
        "seconds": device,
        "operators": operators,
        "bytes_a_second": moved / device,
        "host_us": host * 1e6,
    }


def _random(numel: int, dtype: torch.dtype, timer: Host) -> Tensor:
    return torch.randn(numel, dtype=dtype, device=timer.device)


def _sum(kernels: DeviceKernels, timer: Host, numel: int) -> Row:
    parts = [_random(numel, torch.bfloat16, timer) for _ in range(RANKS)]
    out, expected = (torch.empty(numel, device=timer.device) for _ in range(2))

    def plain() -> None:
        with mock.patch.dict(FOUND.by_device, {timer.device: None}):
            ordered_sum(parts, expected)

    kernels.ordered_sum(parts, out)
    plain()
    moved = numel * (2 * RANKS + 4)
    return _row(timer, f"sum of {RANKS}", moved, same(out, expected), lambda: kernels.ordered_sum(parts, out), plain)


def _norm(kernels: DeviceKernels, timer: Host, numel: int) -> Row:
    tensors = [_random(numel, torch.float32, timer)]

    def ours() -> tuple[Tensor, Tensor]:
        limbs = torch.zeros(LIMBS, dtype=torch.int64, device=timer.device)
        kernels.norm_limbs(tensors, limbs)
        return kernels.clip_factor(limbs, 1.0)

    def plain() -> tuple[Tensor, Tensor]:
        norm = PowerSum.of(tensors, 2.0).norm()
        return norm, clip_factor(norm, 1.0)

    equal = all(same(mine.cpu(), other) for mine, other in zip(ours(), plain(), strict=True))
    return _row(timer, "norm and factor", 4 * numel, equal, ours, plain)


def _scale(kernels: DeviceKernels, timer: Host, numel: int) -> Row:
    tensor, number = _random(numel, torch.bfloat16, timer), torch.tensor(1 + SMALL)
    expected, factor = tensor.clone() * 0.3, torch.tensor(0.3, device=timer.device)
    mine = tensor.clone()
    kernels.scale_([mine], factor)
    on_device = number.to(timer.device)
    return _row(
        timer,
        "product in bf16",
        4 * numel,
        same(mine, expected),
        lambda: kernels.scale_([tensor], on_device),
        lambda: tensor.mul_(number),
    )


def _follow(kernels: DeviceKernels, timer: Host, numel: int) -> Row:
    master = _random(numel, torch.float32, timer)
    param = master.bfloat16()
    param[::1000] += 1
    expected = master.clone()
    plain_follow(expected, param)
    kernels.follow([master], [param])
    return _row(
        timer,
        "masters follow",
        6 * numel,
        same(master, expected),
        lambda: kernels.follow([master], [param]),
        lambda: plain_follow(master, param),
    )
