"""The jobs of `benchmarks.gpu_host`, and their results, as plain values for JSON.

Knows: fields. Does not know: systems, processes, clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .llama import SEVEN_BILLION, Llama

PLAIN, FSDP2, OURS = "plain", "fsdp2", "zero3"
SYSTEMS = (PLAIN, FSDP2, OURS)
UNIT = "unit"  # as a cap: a bucket holds a whole unit
WHOLE_MB = 1 << 20  # more than any unit
PHASES = ("forward", "backward", "clip", "step")


@dataclass(frozen=True)
class Variant:
    """A system, and the cap of its buckets in MiB of the model of seven billion parameters; empty for the others."""

    system: str
    cap: str = ""

    @property
    def name(self) -> str:
        return f"{self.system}, {self.cap}" if self.cap else self.system

    def cap_mb(self, shape: Llama) -> float:
        """Return the cap in MiB at which a narrower model has as many buckets as that of seven billion parameters."""
        return WHOLE_MB if self.cap == UNIT else float(self.cap) * (shape.width / SEVEN_BILLION.width) ** 2


@dataclass(frozen=True)
class HostJob:
    """Train a model under each variant, as one of ``ranks`` ranks, of which there is no other.

    It runs ``warm`` steps and ``steps`` that count, each on one sequence of ``tokens``. ``traces``: the folder for a
    trace and a memory snapshot; empty: none are made.
    """

    variants: list[Variant]
    ranks: int
    device: str
    shape: Llama
    tokens: int
    warm: int
    steps: int
    traces: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostJob:
        record = json.loads(text)
        variants = [Variant(**variant) for variant in record["variants"]]
        return cls(**record | {"variants": variants, "shape": Llama(**record["shape"])})

    def apart(self) -> Iterator[HostJob]:
        """Yield a job for each variant."""
        return (replace(self, variants=[variant]) for variant in self.variants)


@dataclass(frozen=True)
class HostTime:
    """The host's time of a step, in seconds: medians over steps.

    ``forward``, ``backward``, ``clip`` and ``step`` are processor time: of this thread on the CPU, of the process on a
    GPU, where autograd has a thread of its own. ``total``: their sum in a step. ``wall``: of a step, until the device
    is idle. ``norm``: of the last step's gradients. ``buckets``: 0 if the system has none. ``messages``: headers that
    this rank sends in a step.
    """

    variant: str
    ranks: int
    device: str
    layers: int
    width: int
    tokens: int
    forward: float
    backward: float
    clip: float
    step: float
    total: float
    low: float
    high: float
    wall: float
    norm: float
    buckets: int
    messages: int


@dataclass(frozen=True)
class Traced:
    """A step on a device under one variant. Times are in seconds.

    ``in_a_row``: of a step, if only the last of several is waited for. ``kernels``, ``busy``: how many kernels and
    copies a step launches, and for how long at least one of them runs; 0 if the profiler saw none. ``peak``: bytes
    above the start. ``files``: in the folder of the run. ``error``: why there are no results.
    """

    variant: str
    ranks: int
    device: str
    layers: int
    width: int
    tokens: int
    in_a_row: float = 0.0
    kernels: float = 0.0
    busy: float = 0.0
    peak: int = 0
    files: str = ""
    error: str = ""

    @property
    def idle(self) -> float | None:
        """The share of a step in which the device does nothing; None if it is unknown. The profiler slows the host, so
        the time of the step is that without it."""
        return max(0.0, 1 - self.busy / self.in_a_row) if self.kernels and self.in_a_row else None


@dataclass(frozen=True)
class HeaderJob:
    """Time ``blocks`` blocks of ``rounds`` header rounds each, after as many that do not count."""

    rounds: int
    blocks: int
    timeout: float = 60.0


@dataclass(frozen=True)
class HeaderTime:
    """The time of one header round: every rank sends a header to every other, and waits for theirs. In seconds, the
    median and the quartiles over blocks."""

    carrier: str
    header_ranks: int
    seconds: float
    low: float
    high: float


def variants(systems: Sequence[str], caps: Sequence[str]) -> list[Variant]:
    """Return each system, and ours with each cap."""
    return [Variant(system, cap) for system in systems for cap in (caps if system == OURS else [""])]


def read(record: dict[str, Any]) -> HostTime | Traced | HeaderTime:
    """Return the result of a record, by its fields."""
    if "header_ranks" in record:
        return HeaderTime(**record)
    return Traced(**record) if "in_a_row" in record else HostTime(**record)
