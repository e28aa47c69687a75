"""The axes along which a step's time is measured, their points, and a shorter set for a quick run.

Knows: models by name, numbers of ranks, bucket sizes. Does not know: how anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .models import NUMEL, Layers, Tensors
from .step_job import CAP_MB

RANKS = 2


@dataclass(frozen=True)
class Point:
    """A place on an axis. ``x``: its coordinate; ``steps``: the number of timed steps, after the warm ones."""

    x: float
    model: str
    ranks: int = RANKS
    bucket_cap_mb: float = CAP_MB
    steps: int = 12


@dataclass(frozen=True)
class Axis:
    """One axis.

    ``unit``: the name of one unit of x. A slope is printed in ``each``, a unit of time, of which a second has
    ``scale``. ``by_buckets``: lines are fitted against the number of buckets that a system makes, not against the cap.
    ``plain_once``: the plain loop does not depend on x, and is measured only at the first point.
    """

    name: str
    says: str
    label: str
    unit: str
    each: str
    scale: float
    points: Sequence[Point]
    by_buckets: bool = False
    plain_once: bool = False

    def has_plain(self, point: Point) -> bool:
        return not self.plain_once or point == self.points[0]

    def at(self, *xs: float) -> Axis:
        """Return the axis with only these points."""
        return replace(self, points=[point for point in self.points if point.x in xs])


def _tensors(count: int) -> Point:
    return Point(count, Tensors(count).name, steps=12 if count <= 1000 else 4)


def _elements(width: int) -> Point:
    layers = Layers(8, 1, width)
    return Point(layers.numel / 1e6, layers.name, steps=12 if width <= 1024 else 4)


_SPLIT = Layers(4, 16, 256)  # 64 tensors of 256 KiB
_WHOLE = Layers(8, 1, 1024)

TENSORS = Axis(
    "tensors",
    f"up to 8 units of tensors of {NUMEL} elements each",
    "parameter tensors",
    "tensor",
    "µs",
    1e6,
    [_tensors(count) for count in (10, 100, 300, 1000, 3000, 10000)],
)
ELEMENTS = Axis(
    "elements",
    "8 square matrices, one row of input a rank",
    "elements, millions",
    "million elements",
    "ms",
    1e3,
    [_elements(width) for width in (128, 256, 512, 1024, 2048)],
)
BUCKETS = Axis(
    "bucket size",
    "64 matrices of 256 KiB in 4 units",
    "bucket_cap_mb",
    "bucket",
    "µs",
    1e6,
    [Point(cap, _SPLIT.name, bucket_cap_mb=cap) for cap in (0.25, 0.5, 1, 2, 4, 8, 16)],
    by_buckets=True,
    plain_once=True,
)
WORLD = Axis(
    "ranks",
    "8 matrices of 1024 × 1024, one row of input a rank",
    "ranks",
    "rank",
    "ms",
    1e3,
    [Point(ranks, _WHOLE.name, ranks) for ranks in (1, 2, 3, 4)],
    plain_once=True,
)
AXES: dict[str, Axis] = {axis.name: axis for axis in (TENSORS, ELEMENTS, BUCKETS, WORLD)}
QUICK: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        TENSORS.at(10, 300, 1000),
        ELEMENTS.at(*(point.x for point in ELEMENTS.points[:4:2])),
        BUCKETS.at(0.25, 1, 16),
        WORLD.at(1, 2),
    )
}
