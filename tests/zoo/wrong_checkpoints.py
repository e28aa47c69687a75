"""Bugs of checkpoints as functions: each is named as its row of ``zoo.csv``, and takes the real function of its seam.

It returns the wrong one, which takes the real one's place.
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


def offsets_as_if_ranks_divided_evenly(real: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        part, step = real(*arguments), 3 * 64
        return replace(part, begin=part.begin // step * step)

    return wrong


def padding_is_written(real: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        part = real(*arguments)
        return replace(part, nbytes=-(-part.nbytes // 64) * 64)

    return wrong


def the_first_holder_writes_everything(real: Any) -> Any:
    def wrong(self: Any, bucket: Any, rank: int) -> tuple[int, int]:
        begin, end = self.stage.update_interval(bucket, rank % self.shards)
        number = rank if self.stage.states is Placement.WHOLE else rank // self.shards
        return (begin, begin) if number else (begin, end)

    return wrong


def scalars_are_zeros(real: Any) -> Any:
    def wrong(self: Any) -> None:
        before = set(self.staged)
        real(self)
        for source in set(self.staged) - before:
            self.staged[source].zero_()

    return wrong


def an_incomplete_folder_is_a_checkpoint(real: Any) -> Any:
    return lambda directory: list(steps_in(directory))


def older_checkpoints_are_removed_before_the_commit(real: Any) -> Any:
    def wrong(self: Any, folder: Any, manifest: Any) -> None:
        self._retention.apply(self._directory, manifest.step)
        real(self, folder, manifest)

    return wrong


def a_step_is_gone_while_it_is_replaced(real: Any) -> Any:
    return lambda directory: {
        step: path for step, path in real(directory).items() if not path.name.startswith(".trash")
    }


def room_is_found_while_it_is_written(real: Any) -> Any:
    return lambda path, nbytes: (real(path, 0), os.truncate(path, nbytes)) is not None


def ranks_meet_when_the_save_is_over(real: Any) -> Any:
    def wrong(self: Any, *arguments: Any) -> Any:
        saving = real(self, *arguments)
        if saving is not None:
            saving.wait()
            self._transport.exchange(b"", Tag(Kind.EXCHANGE, "written"))
        return saving

    return wrong


def a_save_meets_twice(real: Any) -> Any:
    return lambda self, problem, message: (real(self, problem, b""), real(self, problem, message))[1]


def a_save_that_is_over_keeps_its_copies(real: Any) -> Any:
    def wrong(self: Any) -> None:
        self.kept = dict(self._plan.snapshot._staged)
        real(self)

    return wrong


def paths_are_not_compared(real: Any) -> Any:
    def wrong(self: Any, *given: Any) -> Any:
        own = real(self, *given)
        own.message["agree"].pop("the folder")
        return own

    return wrong


def files_are_looked_for_under_another_name(real: Any) -> Any:
    return lambda directory: {step: path for step, path in real(directory).items() if path.name == f"step-{step}"}


def without_locks_two_runs_write(real: Any) -> Any:
    return lambda self: real(self) or True


def parts_are_put_together_unseen(real: Any) -> Any:
    def wrong(folder: Path, paths: Any, fragments: Any) -> None:
        def as_found(fragment: Any) -> Any:
            data = (folder / "parts" / f"rank-{fragment.rank:05d}").read_bytes()[fragment.place :]
            return replace(fragment, crc32=zlib.crc32(data[: fragment.length].ljust(fragment.length, b"\0")))

        real(folder, paths, {path: list(map(as_found, found)) for path, found in fragments.items()})

    return wrong


def one_rank_alone_hears_of_a_signal(real: Any) -> Any:
    return lambda self, reports: real(self, [reports[0], *({} for _ in reports[1:])])


def resumes_as_from_scratch(real: Any) -> Any:
    return lambda self, *arguments, optimizer_too, **others: real(self, *arguments, optimizer_too=False, **others)


def a_pickle_is_unpickled(real: Any) -> Any:
    def wrong(self: Any, path: str) -> Any:
        data = (self.path / path).read_bytes()
        if data[:1] == b"\x80":
            pickle.loads(data)
        return real(self, path)

    return wrong


def a_stream_that_is_refused_is_a_fresh_one(real: Any) -> Any:
    def wrong(states: Any) -> list[str]:
        try:
            found: list[str] = real({**states, "torch": states["numpy"]})
        except TypeError:
            return []
        return found

    return wrong


def rank_0s_streams_on_all_ranks(real: Any) -> Any:
    return lambda self, rank: {**real(self, rank), "rng": real(self, 0)["rng"]}


def rank_0s_position_on_all_ranks(real: Any) -> Any:
    return lambda self, rank: {**real(self, rank), "rank_state": real(self, 0)["rank_state"]}


def positions_of_further_ranks_are_lost(real: Any) -> Any:
    def wrong(self: Any, *arguments: Any, reshard: Any, **others: Any) -> None:
        fewer = reshard and (lambda states, rank, world: reshard(states[:world], rank, world))
        real(self, *arguments, reshard=fewer, **others)

    return wrong


def a_load_counts_a_step(real: Any) -> Any:
    def wrong(self: Any, *arguments: Any) -> Any:
        found = real(self, *arguments)
        if found is not None and "step" in found.scalars:
            found.scalars["step"] += 1
        return found

    return wrong


def every_rank_reads_everything(real: Any) -> Any:
    def wrong(self: Any, bucket: Any) -> Any:
        whole = self._contents.parts.stage.states is Placement.WHOLE
        return (0, bucket.spec.numel) if whole else real(self, bucket)

    return wrong
