"""Tables of saves and loads, and the targets.

Knows: samples, columns. Does not know: how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from .checkpoint_job import (
    CACHED,
    COLD,
    COPY,
    DCP,
    DCP_PROCESS,
    DCP_THREAD,
    DISK,
    EVERY,
    MANY,
    PEAK_OF_LOAD,
    PEAK_OF_SAVE,
    SAVE,
    SAVES,
    TRAIN,
    WARM,
    WITHOUT,
    ZERO,
    ZERO_ASYNC,
    SaveSample,
)
from .job import quartiles
from .tables import MIB, Table, milliseconds

SMALL_TENSORS = "tensors-"
LARGE_BYTES = 1e9


class CheckpointResults:
    """Samples of one machine, by what was measured, the model, the number of ranks, and the way."""

    def __init__(self, samples: Sequence[SaveSample]) -> None:
        self._found: dict[tuple[str, str, int, str], list[SaveSample]] = {}
        for sample in samples:
            self._found.setdefault((sample.what, sample.model, sample.ranks, sample.way), []).append(sample)

    def of(self, what: str) -> list[tuple[str, int]]:
        """Return every model and number of ranks for which something was measured."""
        return list(dict.fromkeys((model, ranks) for found, model, ranks, _ in self._found if found == what))

    def ways(self, what: str, model: str, ranks: int) -> list[str]:
        return [way for *found, way in self._found if found == [what, model, ranks]]

    def values(self, what: str, model: str, ranks: int, way: str, name: str) -> list[float]:
        """Return a number of every round, in order; an empty list if it was not measured."""
        found = self._found.get((what, model, ranks, way), [])
        return [sample.values[name] for sample in sorted(found, key=lambda sample: sample.round)]

    def has(self, what: str, model: str, ranks: int, *ways: str) -> bool:
        return all((what, model, ranks, way) in self._found for way in ways)

    def median(self, what: str, model: str, ranks: int, way: str, name: str) -> float:
        """Return the median over rounds."""
        return median(self.values(what, model, ranks, way, name))

    def ratio(self, what: str, model: str, ranks: int, way: str, than: str, name: str) -> float | None:
        """Return the median over rounds of the ratio to another way in the same round; None without one of them."""
        if not self.has(what, model, ranks, way, than):
            return None
        pairs = zip(
            self.values(what, model, ranks, way, name), self.values(what, model, ranks, than, name), strict=True
        )
        return median(mine / theirs for mine, theirs in pairs)

    def lost(self, model: str, ranks: int, way: str) -> list[float]:
        """Return, by round, the seconds that a save takes from training: ten steps with it, minus ten without."""
        usual = self.median(TRAIN, model, ranks, WITHOUT[way], "seconds")
        return [seconds - usual for seconds in self.values(TRAIN, model, ranks, way, "seconds")]


def every(results: CheckpointResults) -> Iterator[Table]:
    """Yield all tables."""
    for model, ranks in results.of(SAVE):
        yield _saves(results, model, ranks)
    for model, ranks in results.of(TRAIN):
        yield _trainings(results, model, ranks)
    for model, ranks in results.of(COLD):
        yield _loads(results, model, ranks)
    if results.of(PEAK_OF_SAVE) or results.of(PEAK_OF_LOAD):
        yield _peaks(results)
    for model, ranks in results.of(MANY):
        yield _many(results, model, ranks)
    yield Table("What must be seen", ["measure", "model", "target", "measured", "met"], list(_targets(results)))


def _spread(values: Sequence[float]) -> str:
    low, high = quartiles(values)
    return f"{milliseconds(low)}–{milliseconds(high)}"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _payload(results: CheckpointResults, model: str, ranks: int) -> float:
    return results.median(SAVE, model, ranks, DISK, "nbytes")


def _per_gigabyte(results: CheckpointResults, model: str, ranks: int, way: str) -> float:
    return results.median(SAVE, model, ranks, way, "cpu") * 1e9 / _payload(results, model, ranks)


def _files(results: CheckpointResults, model: str, ranks: int, way: str) -> float:
    return results.median(SAVE, model, ranks, way, "files") / _payload(results, model, ranks)


def _saves(results: CheckpointResults, model: str, ranks: int) -> Table:
    rows = []
    for way in results.ways(SAVE, model, ranks):
        done = results.values(SAVE, model, ranks, way, "done")
        is_save = way not in (DISK, CACHED, COPY)
        rows.append(
            [
                way,
                milliseconds(results.median(SAVE, model, ranks, way, "call")) if is_save else "–",
                _spread(results.values(SAVE, model, ranks, way, "call")) if is_save else "–",
                milliseconds(median(done)),
                _spread(done),
                _two(results.ratio(SAVE, model, ranks, way, DISK, "done")),
                _two(results.ratio(SAVE, model, ranks, way, DCP, "done")) if is_save else "–",
                f"{_per_gigabyte(results, model, ranks, way):.2f}" if is_save and way != DCP_PROCESS else "–",
                f"{_files(results, model, ranks, way):.2f}" if is_save else "–",
            ]
        )
    columns = [
        "way",
        "call ms",
        "quartiles",
        "complete ms",
        "quartiles",
        "÷ disk",
        "÷ DCP",
        "CPU s/GB",
        "files ÷ payload",
    ]
    rounds = len(results.values(SAVE, model, ranks, DISK, "done"))
    return Table(
        f"{model}: a save of {_payload(results, model, ranks) / 1e6:.1f} MB, {ranks} ranks, {rounds} rounds",
        columns,
        rows,
    )


def _trainings(results: CheckpointResults, model: str, ranks: int) -> Table:
    rows = []
    for way in results.ways(TRAIN, model, ranks):
        seconds = results.median(TRAIN, model, ranks, way, "seconds")
        worst = milliseconds(results.median(TRAIN, model, ranks, way, "worst"))
        row = [way, milliseconds(seconds), worst]
        if way in SAVES:
            lost = results.lost(model, ranks, way)
            row += [milliseconds(median(lost)), _spread(lost), f"{100 * _share(results, model, ranks, way):.1f} %"]
        else:
            row += ["–"] * 3
        rows.append(row)
    columns = ["way", f"{EVERY} steps ms", "worst step ms", "lost ms", "quartiles", "of training"]
    return Table(f"{model}: {EVERY} steps with a save, {ranks} ranks", columns, rows)


def _share(results: CheckpointResults, model: str, ranks: int, way: str) -> float:
    """Return the time that a save takes from training, as a part of the ten steps without one."""
    return median(results.lost(model, ranks, way)) / results.median(TRAIN, model, ranks, WITHOUT[way], "seconds")


def _loads(results: CheckpointResults, model: str, ranks: int) -> Table:
    rows = []
    for way in results.ways(COLD, model, ranks):
        row = [way]
        for what in (COLD, WARM):
            seconds = results.values(what, model, ranks, way, "seconds")
            row += [milliseconds(median(seconds)), _spread(seconds)]
            row += [_two(results.ratio(what, model, ranks, way, than, "seconds")) for than in (DISK, DCP)]
        rows.append(row)
    columns = ["way", "cold ms", "quartiles", "÷ disk", "÷ DCP", "warm ms", "quartiles", "÷ disk", "÷ DCP"]
    return Table(f"{model}: a load, ranks: {ranks}, saved by 2", columns, rows)


def _peaks(results: CheckpointResults) -> Table:
    rows = [
        [what, way, model, str(ranks), f"{results.median(what, model, ranks, way, 'added') / 1e6:.1f}"]
        for what in (PEAK_OF_SAVE, PEAK_OF_LOAD)
        for model, ranks in results.of(what)
        for way in results.ways(what, model, ranks)
    ]
    return Table("What it adds to the peak of a rank's resident bytes", ["what", "way", "model", "ranks", "MB"], rows)


_COUNTED = ("resident", "descriptors", "threads", "shared", "entries")


def _many(results: CheckpointResults, model: str, ranks: int) -> Table:
    (way,) = results.ways(MANY, model, ranks)
    counted = [results.values(MANY, model, ranks, way, name) for name in ("saves", *_COUNTED)]
    rows = [
        [f"{saves:.0f}", f"{nbytes / 1e6:.1f}", *(f"{value:.0f}" for value in rest)]
        for saves, nbytes, *rest in zip(*counted, strict=True)
    ]
    columns = ["saves", "resident MB", "descriptors", "threads", "mapped shared memory", "entries of the folder"]
    return Table(f"{model}: a save after every step, {ranks} ranks", columns, rows)


# -- targets ----------------------------------------------------------------------------------------------------------


def _row(
    what: str, model: str, most: float, value: float | None, unit: str = "", form: str = ".2f"
) -> Iterator[list[str]]:
    if value is not None:
        seen = f"{value:{form}}{unit}" if abs(value) >= 0.1 or unit else f"{value:.3f}"
        yield [what, model, f"≤ {most:g}{unit}", seen, "yes" if value <= most else "no"]


def _targets(results: CheckpointResults) -> Iterator[list[str]]:
    for model, ranks in results.of(SAVE):
        yield from _of_saves(results, model, ranks)
    for model, ranks in results.of(TRAIN):
        yield from _of_trainings(results, model, ranks)
    for model, ranks in results.of(COLD):
        yield from _of_loads(results, f"{model}, {ranks} ranks", model, ranks)
    yield from _of_memory(results)


def _of_saves(results: CheckpointResults, model: str, ranks: int) -> Iterator[list[str]]:
    def ratio(way: str, than: str, name: str) -> float | None:
        return results.ratio(SAVE, model, ranks, way, than, name)

    many = model.startswith(SMALL_TENSORS)
    if not many:
        most = 1.2 if _payload(results, model, ranks) >= LARGE_BYTES else 1.5
        yield from _row("blocking save ÷ disk", model, most, ratio(ZERO, DISK, "done"))
    yield from _row("blocking save ÷ DCP's", model, 0.03 if many else 0.8, ratio(ZERO, DCP, "done"))
    if many:
        yield from _row("files ÷ payload", model, 1.5, _files(results, model, ranks, ZERO))
    yield from _row("async call ÷ DCP's", model, 0.02 if many else 0.2, ratio(ZERO_ASYNC, DCP_THREAD, "call"))
    if not many:
        call, copy = (1e3 * results.median(SAVE, model, ranks, way, "call") for way in (ZERO_ASYNC, COPY))
        yield from _row("async call, ms: 2 copies of the slice + 2 ms", model, round(2 * copy + 2, 1), call)
        yield from _row("CPU seconds a GB", model, 0.45, _per_gigabyte(results, model, ranks, ZERO))


def _of_trainings(results: CheckpointResults, model: str, ranks: int) -> Iterator[list[str]]:
    if not results.has(TRAIN, model, ranks, *SAVES):
        return
    mine = median(results.lost(model, ranks, ZERO_ASYNC))
    blocking = median(results.lost(model, ranks, ZERO))
    theirs = min(median(results.lost(model, ranks, way)) for way in (DCP_THREAD, DCP_PROCESS))
    yield from _row("lost per async save ÷ lost per blocking save", model, 0.3, _part(mine, blocking))
    yield from _row(
        "lost per async save, of ten steps", model, 3.5, 100 * _share(results, model, ranks, ZERO_ASYNC), " %"
    )
    yield from _row("lost per async save ÷ the least of DCP's", model, 1, _part(mine, theirs))


def _part(lost: float, other: float) -> float:
    """Return what was lost as a part of what another way has lost; infinite beside nothing, as noise can make it."""
    return lost / other if other > 0 else math.inf if lost > 0 else 0.0


def _of_loads(results: CheckpointResults, name: str, model: str, ranks: int) -> Iterator[list[str]]:
    for what in (COLD, WARM):
        if model.startswith(SMALL_TENSORS):
            yield from _row(f"{what} ÷ DCP's", name, 0.1, results.ratio(what, model, ranks, ZERO, DCP, "seconds"))
        else:
            yield from _row(f"{what} ÷ a read", name, 1.3, results.ratio(what, model, ranks, ZERO, DISK, "seconds"))


def _of_memory(results: CheckpointResults) -> Iterator[list[str]]:
    for model, ranks in results.of(PEAK_OF_LOAD):
        added = results.median(PEAK_OF_LOAD, model, ranks, ZERO, "added") / MIB
        yield from _row("peak of a load", model, 16, added, " MiB", ".1f")
    for model, ranks in results.of(PEAK_OF_SAVE):
        added = results.median(PEAK_OF_SAVE, model, ranks, ZERO_ASYNC, "added") / MIB
        own = results.median(PEAK_OF_SAVE, model, ranks, ZERO_ASYNC, "parameters") / MIB
        most = round(3 * own + 16, 1)  # a step copies what is not written yet
        yield from _row("peak of a save: parameters, states and 16 MiB", model, most, added, " MiB", ".1f")
    for model, ranks in results.of(MANY):
        for name in _COUNTED:
            (way,) = results.ways(MANY, model, ranks)
            counted = results.values(MANY, model, ranks, way, name)
            grown = counted[-1] - counted[0]
            if name == "resident":
                yield from _row("growth over many saves: resident", model, 1, grown / MIB, " MiB", ".1f")
            else:
                yield from _row(f"growth over many saves: {name}", model, 0, grown, form=".0f")
