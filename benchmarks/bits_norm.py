"""The time and the value of this library's exact norm, beside torch's.

Knows: clocks, norms. Does not know: gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from zero.core.norm import PowerSum

from .job import quartiles

PIECE = 1 << 24  # elements of a piece, like a matrix of 4096 x 4096
WARM, TIMES = 1, 7


@dataclass(frozen=True)
class NormTime:
    """The time of a norm over ``elements`` numbers in fp32, in seconds, and its value as hexadecimal digits."""

    norm: str
    elements: int
    seconds: float
    low: float
    high: float
    value: str


def measure(device: torch.device, elements: int) -> Iterator[NormTime]:
    """Time both norms over the same numbers, in turn."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(elements, generator=generator, device=device)
    pieces = list(torch.split(numbers, PIECE))
    norms: dict[str, Callable[[], Tensor]] = {
        "zero, exact": lambda: PowerSum.of(pieces, 2.0).norm(torch.float32),
        "torch.nn.utils.get_total_norm": lambda: torch.nn.utils.get_total_norm(pieces),
    }
    seconds: dict[str, list[float]] = {name: [] for name in norms}
    values: dict[str, float] = {}
    for number in range(-WARM, TIMES):
        for name, norm in norms.items():
            _finish(device)
            begin = time.perf_counter()
            values[name] = norm().item()  # clipping needs it on the host here, and torch's on the device
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    for name, times in seconds.items():
        yield NormTime(name, elements, median(times), *quartiles(times), values[name].hex())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
