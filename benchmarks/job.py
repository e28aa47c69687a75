"""The job of the ranks and their records, as plain values for JSON.

Knows: fields. Does not know: processes, tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import Any


@dataclass(frozen=True)
class Job:
    """The measurements of a run.

    ``sizes``: bytes of a whole buffer. ``seconds``: the time for a size, in ``least`` to ``most`` rounds.
    ``interface``: the network interface whose counters are read around every run, or "". ``late``: seconds by which one
    rank is late while the CPU time of the waiting ranks is measured; 0: not measured.
    """

    algorithms: Sequence[str]
    sizes: Sequence[int]
    seconds: float
    least: int
    most: int
    roofline: bool = False
    interface: str = ""
    late: float = 0.0
    timeout: float = 120.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; of one value, that value."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Measured:
    """One algorithm at one size.

    Seconds of the slowest rank: ``median`` and quartiles (``low``, ``high``) over ``rounds`` rounds. Bytes of one run
    by rank, medians over rounds: ``left`` and ``came`` are those that left and reached its host by the interface's
    counters; ``crossed`` are those that the library counted.
    """

    operation: str
    world_size: int
    nbytes: int
    algorithm: str
    rounds: int
    median: float
    low: float
    high: float
    left: list[int] = field(default_factory=list)
    came: list[int] = field(default_factory=list)
    crossed: list[int] = field(default_factory=list)

    @property
    def algbw(self) -> float:
        """Bytes of the whole buffer a second, as nccl-tests define it."""
        return self.nbytes / self.median

    @property
    def busbw(self) -> float:
        """`algbw` times (W - 1) / W, as nccl-tests define it: the bytes that a rank must receive a second."""
        return self.algbw * (self.world_size - 1) / self.world_size


@dataclass(frozen=True)
class Waited:
    """CPU seconds of the rank that used most while it waited ``late`` seconds for another rank."""

    world_size: int
    algorithm: str
    late: float
    cpu_seconds: float


def read(record: dict[str, Any]) -> Measured | Waited:
    """Return a record from its JSON object."""
    return Waited(**record) if "cpu_seconds" in record else Measured(**record)
