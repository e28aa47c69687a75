"""Bugs of checkpoints as functions: each is named as its row of ``zoo.csv``, and runs in the place of its seam.

``real`` is the function that it replaces.
"""

from __future__ import annotations

import os
import pickle
import zlib
from dataclasses import replace
from pathlib import Path
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


def an_incomplete_folder_is_a_checkpoint(real: Any, directory: Any) -> Any:
    return list(steps_in(directory))


def older_checkpoints_are_removed_before_the_commit(real: Any, self: Any, folder: Any, manifest: Any) -> None:
    self._retention.apply(self._directory, manifest.step)
    real(self, folder, manifest)


def a_step_is_gone_while_it_is_replaced(real: Any, directory: Any) -> Any:
    return {step: path for step, path in real(directory).items() if not path.name.startswith(".trash")}


def room_is_found_while_it_is_written(real: Any, path: Any, nbytes: Any) -> Any:
    return (real(path, 0), os.truncate(path, nbytes)) is not None


def ranks_meet_when_the_save_is_over(real: Any, self: Any, *arguments: Any) -> Any:
    saving = real(self, *arguments)
    if saving is not None:
        saving.wait()
        self._transport.exchange(b"", Tag(Kind.EXCHANGE, "written"))
    return saving


def a_save_meets_twice(real: Any, self: Any, problem: Any, message: Any) -> Any:
    return (real(self, problem, b""), real(self, problem, message))[1]


def a_save_that_is_over_keeps_its_copies(real: Any, self: Any) -> None:
    self.kept = dict(self._plan.snapshot._staged)
    real(self)


def paths_are_not_compared(real: Any, self: Any, *given: Any) -> Any:
    own = real(self, *given)
    own.message["agree"].pop("the folder")
    return own


def files_are_looked_for_under_another_name(real: Any, directory: Any) -> Any:
    return {step: path for step, path in real(directory).items() if path.name == f"step-{step}"}


def without_locks_two_runs_write(real: Any, self: Any) -> Any:
    return real(self) or True


def parts_are_put_together_unseen(real: Any, folder: Path, paths: Any, fragments: Any) -> None:
    def as_found(fragment: Any) -> Any:
        data = (folder / "parts" / f"rank-{fragment.rank:05d}").read_bytes()[fragment.place :]
        return replace(fragment, crc32=zlib.crc32(data[: fragment.length].ljust(fragment.length, b"\0")))

    real(folder, paths, {path: list(map(as_found, found)) for path, found in fragments.items()})


def one_rank_alone_hears_of_a_signal(real: Any, self: Any, reports: Any) -> Any:
    return real(self, [reports[0], *({} for _ in reports[1:])])


def resumes_as_from_scratch(real: Any, self: Any, *arguments: Any, optimizer_too: Any, **others: Any) -> Any:
    return real(self, *arguments, optimizer_too=False, **others)


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


def rank_0s_streams_on_all_ranks(real: Any, self: Any, rank: Any) -> Any:
    return {**real(self, rank), "rng": real(self, 0)["rng"]}


def rank_0s_position_on_all_ranks(real: Any, self: Any, rank: Any) -> Any:
    return {**real(self, rank), "rank_state": real(self, 0)["rank_state"]}


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
