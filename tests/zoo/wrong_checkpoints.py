"""Bugs of checkpoints as functions: each is named as its row of ``zoo.csv``, and runs in the place of its seam.

``real`` is the function that it replaces.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from collectives import Kind, Tag
from zero.checkpoint.folder.directory import steps_in
from zero.core.stage import Placement


def offsets_as_if_ranks_divided_evenly(real: Any, *arguments: Any) -> Any:
    part, step = real(*arguments), 3 * 64
    return replace(part, begin=part.begin // step * step)


def padding_is_written(real: Any, *arguments: Any) -> Any:
    part = real(*arguments)
    return replace(part, nbytes=-(-part.nbytes // 64) * 64)


def the_first_holder_writes_everything(real: Any, self: Any, bucket: Any, rank: int) -> tuple[int, int]:
    begin, end = self.stage.update_interval(bucket, rank % self.shards)
    number = rank if self.stage.states is Placement.WHOLE else rank // self.shards
    return (begin, begin) if number else (begin, end)


def scalars_are_zeros(real: Any, self: Any) -> None:
    before = set(self.staged)
    real(self)
    for source in set(self.staged) - before:
        self.staged[source].zero_()


def older_checkpoints_are_removed_before_the_commit(real: Any, self: Any, folder: Any, manifest: Any) -> None:
    self.directory.remove(self._superfluous(manifest.step))
    real(self, folder, manifest)


def ranks_meet_when_the_save_is_over(real: Any, self: Any, *arguments: Any) -> Any:
    saving = real(self, *arguments)
    if saving is not None:
        saving.wait()
        self._transport.exchange(b"", Tag(Kind.EXCHANGE, "written"))
    return saving


def a_save_that_is_over_keeps_its_copies(real: Any, self: Any) -> None:
    self.kept = dict(self._plan.snapshot._staged)
    real(self)


def paths_are_not_compared(real: Any, self: Any, *given: Any) -> Any:
    own = real(self, *given)
    own.message["agree"].pop("the folder")
    return own


def a_pickle_is_unpickled(real: Any, self: Any, path: str) -> Any:
    data = (self.path / path).read_bytes()
    if data[:1] == b"\x80":
        pickle.loads(data)
    return real(self, path)


def a_stream_that_is_refused_is_a_fresh_one(real: Any, states: Any) -> list[str]:
    try:
        found: list[str] = real({**states, "torch": states["numpy"]})
    except TypeError:
        return []
    return found


def positions_of_further_ranks_are_lost(real: Any, self: Any, *arguments: Any, reshard: Any, **others: Any) -> None:
    fewer = reshard and (lambda states, rank, world: reshard(states[:world], rank, world))
    real(self, *arguments, reshard=fewer, **others)


def a_load_counts_a_step(real: Any, self: Any, *arguments: Any) -> Any:
    found = real(self, *arguments)
    if found is not None and "step" in found.scalars:
        found.scalars["step"] += 1
    return found


def every_rank_reads_everything(real: Any, self: Any, bucket: Any) -> Any:
    whole = self._contents.parts.stage.states is Placement.WHOLE
    return (0, bucket.spec.numel) if whole else real(self, bucket)


WRONG: dict[str, Callable[..., Any]] = {
    "an-incomplete-folder-is-a-checkpoint": lambda real, directory: list(steps_in(directory)),
    "a-step-is-gone-while-it-is-replaced": lambda real, directory: (
        {step: path for step, path in real(directory).items() if not path.name.startswith(".trash")}
    ),
    "room-is-found-while-it-is-written": lambda real, path, nbytes: (
        (real(path, 0), os.truncate(path, nbytes)) is not None
    ),
    "a-save-meets-twice": lambda real, self, problem, message: (real(self, problem, b""), real(self, problem, message))[
        1
    ],
    "files-are-looked-for-under-another-name": lambda real, directory: (
        {step: path for step, path in real(directory).items() if path.name == f"step-{step}"}
    ),
    "without-locks-two-runs-write": lambda real, self: real(self) or True,
    "one-rank-alone-hears-of-a-signal": lambda real, self, reports: real(
        self, [reports[0], *({} for _ in reports[1:])]
    ),
    "resumes-as-from-scratch": lambda real, self, *arguments, optimizer_too, **others: real(
        self, *arguments, optimizer_too=False, **others
    ),
    "rank-0s-streams-on-all-ranks": lambda real, self, rank: ({**real(self, rank), "rng": real(self, 0)["rng"]}),
    "rank-0s-position-on-all-ranks": lambda real, self, rank: (
        {**real(self, rank), "rank_state": real(self, 0)["rank_state"]}
    ),
}
"""The bugs that an expression makes, by name."""
