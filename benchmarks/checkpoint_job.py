"""The jobs of the ranks that save and load, and their samples, as plain values for JSON.

Knows: fields, names of ways to save and load. Does not know: systems, processes, tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DISK, CACHED, COPY = "disk", "disk, cached", "memcpy"
ZERO, ZERO_ASYNC = "zero", "zero async"
DCP, DCP_THREAD, DCP_PROCESS, TORCH = "DCP", "DCP thread", "DCP process", "torch"
SAVES = (ZERO, ZERO_ASYNC, DCP, DCP_THREAD, DCP_PROCESS)
LOADS = (DISK, ZERO, DCP, TORCH)
NO_SAVE, NO_SAVE_FSDP2 = "zero, no save", "FSDP2, no save"
WITHOUT = dict(zip(SAVES, (NO_SAVE, NO_SAVE, NO_SAVE_FSDP2, NO_SAVE_FSDP2, NO_SAVE_FSDP2), strict=True))

SAVE, TRAIN, COLD, WARM, PEAK_OF_SAVE, PEAK_OF_LOAD, MANY = (
    "save",
    "train",
    "load, cold",
    "load, warm",
    "peak of a save",
    "peak of a load",
    "many saves",
)
EVERY = 10  # steps between two saves


@dataclass(frozen=True)
class CheckpointJob:
    """Measure ``what`` on ``model``, with files below ``folder``, in ``rounds``; in each, every one of ``ways``."""

    what: str
    model: str
    folder: str
    rounds: int
    ways: Sequence[str]
    timeout: float = 900.0


@dataclass(frozen=True)
class SaveSample:
    """What was measured of one way in one round: numbers by name. Those in `SUMMED` are of all ranks together."""

    what: str
    model: str
    ranks: int
    way: str
    round: int
    values: dict[str, float]


SUMMED = ("cpu", "nbytes")


def merged(of_ranks: Sequence[Sequence[SaveSample]]) -> list[SaveSample]:
    """Return the samples of all ranks as one: a sum, or the largest number of any rank."""
    found = []
    for samples in zip(*of_ranks, strict=True):
        first = samples[0]
        values = {
            name: sum(s.values[name] for s in samples) if name in SUMMED else max(s.values[name] for s in samples)
            for name in first.values
        }
        found.append(SaveSample(first.what, first.model, first.ranks, first.way, first.round, values))
    return found
