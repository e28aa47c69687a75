"""What was measured on a machine, and the file of hardware that says so.

    forward     products/a + attention/b + moved bytes/m + kernels l1 + weight bytes w
    backward    2 products/a + 2.5 attention/b + 2 moved bytes/m + kernels l2 + 2 weight bytes w

The six rates are fitted to timed passes of small models: least squares of the relative residuals, none of them below 0.
What an equation of `zero.planning.seconds.compute` has beside them is taken as it is there.

Knows: equations, units of a file. Does not know: clocks, ranks, models.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .hardware import FORMAT
from .model import UnitWork
from .seconds.compute import ATTENTION_BACKWARD

SOURCE = "zero plan --measure"
FREE = 1e-3  # of the time at the peak, which work takes at least, so that no rate is infinite


@dataclass(frozen=True)
class TimedPasses:
    """A forward and a backward of one model on one rank, while all ranks ran theirs.

    Attributes:
        work: of all its units.
        weight_bytes: of its parameters.
        forward, backward: seconds.
    """

    work: UnitWork
    weight_bytes: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """What the equations need of a processor, in seconds for one unit of work.

    Attributes:
        product, attention: an operation of products, and of attention.
        moved: a byte of element-wise operations.
        launch, launch_backward: a kernel of the forward: in it, and what its backward takes.
        weight: a byte of the weights in a forward.
    """

    product: float
    attention: float
    moved: float
    launch: float
    launch_backward: float
    weight: float

    @classmethod
    def fitted(cls, timed: Sequence[TimedPasses], product: float, copied: float) -> Rates:
        """Return the rates that explain timed passes best.

        Attention is no faster than ``product``, operations a second of a large product, and element-wise operations
        move no more than ``copied`` bytes a second: few short passes could not tell them from other work.
        """
        rows, seconds = list[list[float]](), list[float]()
        for passes in timed:
            work, weights = passes.work, passes.weight_bytes
            products, attention, moved = work.matmul_flops, work.attention_flops, work.moved_bytes
            rows.append([products, attention, moved, work.kernels, 0.0, weights])
            rows.append([2 * products, ATTENTION_BACKWARD * attention, 2 * moved, 0.0, work.kernels, 2 * weights])
            seconds += [passes.forward, passes.backward]
        relative = np.array(rows) / np.array(seconds)[:, None]
        least = np.array([0.0, 1 / product, 1 / copied, 0.0, 0.0, 0.0])
        return cls(*(least + _least_squares(relative, 1 - relative @ least)).tolist())


def _least_squares(relative: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the x >= 0 that brings ``relative`` x nearest to ``wanted``. Tries every set of x that are not 0."""
    count = relative.shape[1]
    best, least = np.zeros(count), float(np.square(wanted).sum())
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(1, count + 1)):
        columns = relative[:, chosen]
        found = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        error = float(np.square(columns @ found - wanted).sum())
        if (found >= 0).all() and error < least:
            least = error
            best = np.zeros(count)
            best[list(chosen)] = found
    return best


@dataclass(frozen=True)
class Measurement:
    """What a machine's processor, memory, ranks and disk were measured to do.

    Attributes:
        machine: its name.
        date: of the measurement.
        ranks: that ran at the same time, one for each processor.
        memory: bytes of a rank.
        rates: of compute in fp32.
        products: operations a second of a large product, by the name of the dtype.
        copied: bytes a second that a copy reads and writes.
        updated: those that a fused Adam reads and writes.
        message: seconds of a short message from every rank to every other.
        disk: bytes a second of offloaded states, to the disk or from it.
    """

    machine: str
    date: str
    ranks: int
    memory: float
    rates: Rates
    products: Mapping[str, float]
    copied: float
    updated: float
    message: float
    disk: float

    def to_json(self) -> dict[str, Any]:
        """Return a file of hardware in which the GPU "cpu" is a rank of this machine."""
        rates, peak, copied = self.rates, self.products["float32"], self.copied
        product = max(rates.product, FREE / peak)
        shares = {
            "matmul": 1 / (product * peak),
            "attention": 1 / (max(rates.attention, FREE / peak) * peak),
        }
        constants = {
            "elementwise": (1 / (max(rates.moved, FREE / copied) * copied), "1"),
            "launch": (max(rates.launch, 1e-9) * 1e6, "us"),
            "backward_kernels": (rates.launch_backward / max(rates.launch, 1e-9) or FREE, "1"),
            "weights": (max(rates.weight * copied, FREE), "1"),
            "hidden": (FREE, "1"),
            "update": (self.updated / copied, "1"),
        }
        gpu = {
            "family": "cpu",
            "memory": _value(self.memory / 2**30, "GiB"),
            "memory_bandwidth": _value(copied / 1e9, "GB/s"),
            "flops": {name: _value(rate / 1e12, "TFLOP/s") for name, rate in self.products.items()},
            "link": _value(copied / 1e9, "GB/s"),
            "host_link": _value(self.disk / 1e9, "GB/s"),
            "per_host": _value(self.ranks, "GPUs"),
            "domain": _value(self.ranks, "GPUs"),
            "power": {"value": 100, "unit": "W", "source": "an assumption; no part of a plan uses it"},
            "efficiency": {name: _value(share, "1") for name, share in shares.items()},
            "constants": {name: _value(*each) for name, each in constants.items()},
        }
        return {
            "format": FORMAT,
            "date": self.date,
            "machine": self.machine,
            "network": {"base": _value(self.message * 1e6, "us")},
            "gpus": {"cpu": gpu},
        }


def _value(value: float, unit: str) -> dict[str, Any]:
    return {"value": float(f"{value:.4g}"), "unit": unit, "source": SOURCE}
