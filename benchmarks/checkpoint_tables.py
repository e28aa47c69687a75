"""Tables of saves and loads.

Knows: samples, columns. Does not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from .checkpoint_rank import (
    CACHED,
    COLD,
    COPY,
    DISK,
    EVERY,
    SAVE,
    SAVES,
    TRAIN,
    WARM,
    WITHOUT,
    SaveSample,
)
from .checkpoint_systems import DCP, DCP_PROCESS
from .tables import Table, milliseconds, quartiles, spread, two

Key = tuple[str, str, int]  # what, model, number of ranks


class CheckpointResults:
    """Samples of one machine."""

    def __init__(self, samples: Sequence[SaveSample]) -> None:
        self._found: dict[Key, dict[str, list[SaveSample]]] = {}
        for sample in samples:
            of = self._found.setdefault((sample.what, sample.model, sample.ranks), {})
            of.setdefault(sample.way, []).append(sample)

    def of(self, what: str) -> list[Key]:
        """Return every model and number of ranks for which something was measured."""
        return [key for key in self._found if key[0] == what]

    def ways(self, key: Key) -> list[str]:
        return list(self._found[key])

    def values(self, key: Key, way: str, name: str) -> list[float]:
        """Return a number of every round, in order."""
        return [sample.values[name] for sample in sorted(self._found[key][way], key=lambda sample: sample.round)]

    def median(self, key: Key, way: str, name: str) -> float:
        return median(self.values(key, way, name))

    def ratio(self, key: Key, way: str, than: str, name: str) -> float | None:
        """Return the median over rounds of the ratio to another way in the same round; None without it."""
        if than not in self._found[key]:
            return None
        pairs = zip(self.values(key, way, name), self.values(key, than, name), strict=True)
        return median(mine / theirs for mine, theirs in pairs)

    def lost(self, key: Key, way: str) -> list[float]:
        """Return, by round, the seconds that a save takes from training: ten steps with it, minus ten without."""
        usual = self.median(key, WITHOUT[way], "seconds")
        return [seconds - usual for seconds in self.values(key, way, "seconds")]


def every(results: CheckpointResults) -> Iterator[Table]:
    """Yield all tables."""
    yield from (_saves(results, key) for key in results.of(SAVE))
    yield from (_trainings(results, key) for key in results.of(TRAIN))
    yield from (_loads(results, key) for key in results.of(COLD))


def _with_spread(values: Sequence[float]) -> list[str]:
    return [milliseconds(median(values)), spread(*quartiles(values))]


def _saves(results: CheckpointResults, key: Key) -> Table:
    payload, rows = results.median(key, DISK, "nbytes"), []
    for way in results.ways(key):
        row = [way]
        if way in (DISK, CACHED, COPY):
            row += ["–", "–", *_with_spread(results.values(key, way, "done"))]
            row += [two(results.ratio(key, way, DISK, "done")), "–", "–", "–"]
        else:
            row += [*_with_spread(results.values(key, way, "call")), *_with_spread(results.values(key, way, "done"))]
            row += [two(results.ratio(key, way, than, "done")) for than in (DISK, DCP)]
            row.append("–" if way == DCP_PROCESS else two(results.median(key, way, "cpu") * 1e9 / payload))
            row.append(two(results.median(key, way, "files") / payload))
        rows.append(row)
    columns = ["way", "call ms", "quartiles", "complete ms", "quartiles", "÷ disk", "÷ DCP", "CPU s/GB", "files"]
    rounds = len(results.values(key, DISK, "done"))
    return Table(f"{key[1]}: a save of {payload / 1e6:.1f} MB, {key[2]} ranks, rounds: {rounds}", columns, rows)


def _trainings(results: CheckpointResults, key: Key) -> Table:
    rows = []
    for way in results.ways(key):
        row = [way, *(milliseconds(results.median(key, way, name)) for name in ("seconds", "worst"))]
        if way in SAVES:
            lost = results.lost(key, way)
            share = 100 * median(lost) / results.median(key, WITHOUT[way], "seconds")
            row += [*_with_spread(lost), f"{share:.1f} %"]
        else:
            row += ["–"] * 3
        rows.append(row)
    columns = ["way", f"{EVERY} steps ms", "worst step ms", "lost ms", "quartiles", "of training"]
    return Table(f"{key[1]}: {EVERY} steps with a save, {key[2]} ranks", columns, rows)


def _loads(results: CheckpointResults, key: Key) -> Table:
    rows = []
    for way in results.ways(key):
        row = [way]
        for what in (COLD, WARM):
            here = what, *key[1:]
            row += _with_spread(results.values(here, way, "seconds"))
            row += [two(results.ratio(here, way, than, "seconds")) for than in (DISK, DCP)]
        rows.append(row)
    columns = ["way", "cold ms", "quartiles", "÷ disk", "÷ DCP", "warm ms", "quartiles", "÷ disk", "÷ DCP"]
    return Table(f"{key[1]}: a load, ranks: {key[2]}, saved by 2", columns, rows)
