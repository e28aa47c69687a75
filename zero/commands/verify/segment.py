"""An elastic run of `zero.verify`: which ranks take which steps, and when one of them is killed.

Knows: numbers drawn at random from a seed. Does not know: processes, optimizers.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["KILLS", "Segment", "elastic_plan"]

KILLS = 3  # of a run, if it has as many steps
MARK = "killed"
Moment = Literal["update", "save"]


@dataclass(frozen=True)
class Segment:
    """The steps of an elastic run between two changes of the number of ranks.

    ``sizes``: the numbers of ranks so far, that of this segment last. In step ``step`` rank ``rank`` kills itself,
    before the update or while the checkpoint of this step is being saved; a ``step`` of 0: no rank does.
    """

    stage: int
    sizes: tuple[int, ...]
    rank: int = 0
    step: int = 0
    moment: Moment = "update"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Segment:
        return Segment(**{**values, "sizes": tuple(values["sizes"])})

    def die(self, folder: Path, rank: int, step: int, moment: Moment) -> None:
        """Kill this process if this is the moment. What it has done is noted in the folder."""
        if (rank, step, moment) == (self.rank, self.step, self.moment):
            (folder / MARK).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def was_killed(folder: Path) -> bool:
        """Return whether a rank has killed itself since the last call."""
        there = (folder / MARK).exists()
        (folder / MARK).unlink(missing_ok=True)
        return there


def elastic_plan(stage: int, steps: int, most: int) -> Iterator[Segment]:
    """Yield the segments of a run of so many steps on at most ``most`` ranks; the last one runs to the end."""
    source = random.Random(stage)
    sizes: list[int] = []
    for step in (*sorted(source.sample(range(1, steps + 1), min(KILLS, steps))), 0):
        others = [size for size in range(1, most + 1) if sizes[-1:] != [size]]
        sizes.append(source.choice(others or [1]))
        moments: list[Moment] = ["update", "save"]
        yield Segment(stage, tuple(sizes), source.randrange(sizes[-1]), step, source.choice(moments))
