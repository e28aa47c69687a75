"""One save on one rank: the plan, the snapshot, and the thread that writes.

Knows: the order plan - write - checksums - commit, and which steps rank 0 alone takes. Does not know: how ranks agree,
where values come from, which checkpoints are kept.

    main thread     (ranks have agreed, values are staged)  start
    thread          rank 0: make the files -> all: write this rank's chunks, to the disk -> rank 0: checksums, commit
    main thread     trains on; an update asks `before_update` first

The thread sends no message. If it fails, its error waits in `error`, and every other rank finds a note of it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..folder.directory import check_free, remove_checkpoint
from ..format.extents import Chunk
from ..format.manifest import NAME, FileSums, Manifest
from ..format.tensorfile import block_sums
from .capture import Snapshot
from .save_folder import GivenUpError, LateError, SaveError, SaveFolder, UnseenError

LONGEST_CAUSE = 500  # characters
_LATE = "late: "  # before a report that another rank may know better
_UNKNOWING = (GivenUpError, LateError, UnseenError)  # errors of a rank that does not know why, or whether, it failed


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes.

    Attributes:
        heads: the first bytes of files, by path, which this rank writes: on rank 0 all headers and all small files.
        chunks: the tensors' bytes that this rank writes.
        sizes: the bytes of every file of all ranks, by path.
        snapshot: from which chunks are taken.
        manifest: without the sums of the files.
    """

    heads: Mapping[str, bytes]
    chunks: Sequence[Chunk]
    sizes: Mapping[str, int]
    snapshot: Snapshot
    manifest: Manifest


class Destination:
    """What becomes of the folder of a save. Rank 0 calls it."""

    def check(self, folder: SaveFolder, step: int) -> None:
        """Raise an error, `FileExistsError` for instance, if no checkpoint may be written there."""
        target = folder.target
        check_free(target, overwrite=folder.overwrite)
        if target.is_dir() and not os.path.lexists(target / NAME) and any(target.iterdir()):
            raise FileExistsError(f"{target} is no checkpoint, since it has no {NAME}: save elsewhere")

    def commit(self, folder: SaveFolder, manifest: Manifest) -> None:
        """Make the folder the checkpoint."""
        folder.commit(manifest, lambda: None)

    def tidy(self, folder: SaveFolder, manifest: Manifest) -> list[str]:
        """Remove what the commit, if it is synced, has made superfluous. Return, as text, what was left, and why."""
        if folder.unsynced is not None:
            return [folder.unsynced]
        return remove_checkpoint(folder.trash) if os.path.lexists(folder.trash) else []


class Saving:
    """A save under way or complete, as `CheckpointManager.save` returns it.

    Optimizer states are written directly from their memory: an in-place edit of ``optimizer.state[p]``, before the next
    step and before the save is done, may end up in the checkpoint. Everything else may change at once.

    Attributes:
        step: the checkpoint's number.
        path: the folder that the checkpoint will have.
        blocked_ms: the milliseconds that this rank's training has waited for the save so far.
        nbytes: the bytes that this rank writes; ``total_bytes``: the size of the checkpoint.
        seconds: the time from the start of the writing to the commit; 0 until then.
    """

    def __init__(
        self,
        step: int,
        folder: SaveFolder,
        plan: SavePlan | BaseException,
        destination: Destination | None,
        report: Callable[[str, str | None], None],
    ) -> None:
        """``plan``: or the error for which there is none; the save then fails at once, on all ranks.

        ``destination``: on rank 0. ``report``: lets all ranks have a text, under a name, at their next agreement.
        Internal.
        """
        self.step, self.path = step, folder.target
        self.blocked_ms = self.seconds = 0.0
        self.total_bytes = 0 if isinstance(plan, BaseException) else sum(plan.sizes.values())
        self.nbytes = 0 if isinstance(plan, BaseException) else sum(chunk.nbytes for chunk in plan.chunks)
        self.error: SaveError | None = None
        self.was_raised = False  # to the caller
        self._was_told = False  # that it has failed, to the caller
        self._remarks: list[str] = []  # of a checkpoint that is complete
        self._folder = folder
        self._plan: SavePlan | BaseException | None = plan  # None when the save is over
        self._destination, self._report = destination, report
        self.report = f"checkpoint {folder.nonce}"  # the name of the text that lets the other ranks know a failure
        self._content = ""
        self._finished = threading.Event()

    # -- what a caller sees -------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the save is over: committed or failed. Local."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed, and return its ``content``. Local.

        Raises the error that ended the save, or `TimeoutError` after ``timeout`` seconds.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path} is not complete after {timeout:g} s")
        if self.error is not None:
            self.was_raised = True
            raise self.error
        return self._content

    # -- main thread --------------------------------------------------------------------------------------------------

    def start(self, *, asynchronous: bool) -> None:
        """Write in a thread, or here. Raises only an interrupt of the caller, which ends the save, too. Internal."""
        if asynchronous and isinstance(self._plan, SavePlan):
            try:
                name = f"zero-checkpoint rank {self._folder.rank}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
                return
            except RuntimeError as error:  # there are too many threads
                self._plan = error
        self._run()
        cause = None if self.error is None else self.error.__cause__
        if cause is not None and not isinstance(cause, Exception):
            raise cause

    def before_update(self, bucket: int) -> None:
        """Keep what an update of this bucket is about to change. Internal."""
        plan = self._plan
        if isinstance(plan, SavePlan):
            began = time.perf_counter()
            plan.snapshot.before_update(bucket)
            self.blocked_ms += 1000 * (time.perf_counter() - began)

    def news(self) -> list[str]:
        """Return what the caller must hear of the end of the save, once. It must be over. Internal."""
        found, self._remarks = self._remarks, []
        return found if self.error is None else [*found, *self._failed(str(self.error))]

    def hear(self, reports: Sequence[Mapping[str, str]]) -> list[str]:
        """Return, once, that the save has failed, if some rank has reported it. All ranks hear it in the same step.

        A rank that knows it to be complete does not: rank 0 has decided before the other one was interrupted, say.
        Internal.
        """
        found = [report[self.report] for report in reports if self.report in report]
        if not found or (self.done() and self.error is None):
            return []
        why = min(found, key=lambda text: text.startswith(_LATE)).removeprefix(_LATE)
        self.learn(why)
        return self._failed(why)

    def _failed(self, why: str) -> list[str]:
        """Return, once, that the save has failed, or that this rank cannot see whether it has."""
        if self._was_told or self.was_raised:
            return []
        self._was_told = True
        if isinstance(self.error, UnseenError):
            return [why]
        folder = self.path.parent
        there = f"; older checkpoints in {folder} are as they were" if folder.is_dir() else ""
        return [
            f"the save of step {self.step} has failed, and training goes on: {why}{there}; the next save tries again"
        ]

    def wait(self) -> None:
        """Wait until the save is over, and raise nothing. Waits for other ranks end by themselves. Internal."""
        self._finished.wait()

    def learn(self, why: str) -> None:
        """Note that the save has failed on another rank. Internal."""
        if not self.done():
            self._folder.abandon(why)
        elif isinstance(self.error, _UNKNOWING):
            self.error = SaveError(why)

    def outcome(self) -> bytes:
        """Return, as a message for `settle`, how the save has ended, as far as this rank knows. Internal."""
        cause = None if self.error is None or isinstance(self.error, _UNKNOWING) else str(self.error)[:LONGEST_CAUSE]
        return json.dumps([self._content, cause]).encode()

    def settle(self, outcomes: Sequence[bytes]) -> None:
        """Take note of how the save has ended on all ranks, whose `outcome` are given: rank 0 decides. Internal."""
        found = [json.loads(outcome) for outcome in outcomes]
        content, _ = found[0]
        if content and isinstance(self.error, _UNKNOWING):
            self.error, self._content = None, content
        for _, cause in found:
            if cause is not None and not content:
                self.learn(cause)

    def abandon(self, why: str, after: float) -> None:
        """End all waits for other ranks, ``after`` so many seconds. Internal."""
        self._folder.abandon(why, after)

    def remove_rest(self) -> None:
        """Remove what the save has left next to a checkpoint, on rank 0. All ranks have seen how it ended. Internal."""
        self.withdraw()
        if self._folder.rank == 0:
            self._folder.remove_rest()

    def withdraw(self) -> None:
        """Let the other ranks hear no more of a failure. Internal."""
        self._report(self.report, None)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        began, plan = time.perf_counter(), self._plan
        try:
            if not isinstance(plan, SavePlan):
                assert plan is not None, "a save runs once"
                raise plan
            try:
                manifest = self._save(plan)
            finally:
                plan.snapshot.end()  # before anything else: no step waits for what follows
            self.seconds = time.perf_counter() - began
            if self._destination is not None and manifest is not None:
                self._remarks = self._tidy(self._destination, manifest)
        except BaseException as error:
            self._fail(error)
        finally:
            self._plan = None
            del plan  # an error keeps this frame
            self._finished.set()

    def _fail(self, error: BaseException) -> None:
        traceback.clear_frames(error.__traceback__)  # they hold what was to be written
        self.error = self._as_save_error(error)
        text = str(self.error).encode(errors="backslashreplace").decode()  # a path may have bytes that are no text
        self.error.args = (text,)
        if isinstance(self.error, UnseenError):
            return  # this rank has done its part: it is no failure of the save
        if not isinstance(self.error, GivenUpError):
            self._report(self.report, f"{_LATE if isinstance(self.error, LateError) else ''}{self.error}")
        self._folder.fail(str(self.error))

    def _as_save_error(self, error: BaseException) -> SaveError:
        if isinstance(error, FileNotFoundError) and self._folder.rank != 0:
            try:
                with suppress(OSError):
                    self._folder.check()  # rank 0 has removed the files, and this is no error of this rank
            except SaveError as given_up:
                return given_up
        if isinstance(error, SaveError):
            return error
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and not self.path.parent.is_dir():
            text = f"{self.path.parent} was removed ({text}): make it again, and saves go on"
        told = SaveError(f"rank {self._folder.rank} could not save {self.path}: {text}")
        told.__cause__ = error
        return told

    def _save(self, plan: SavePlan) -> Manifest | None:
        """Write this rank's part, and wait until the checkpoint is committed. Rank 0 does, and returns its manifest."""
        folder, block_bytes = self._folder, plan.manifest.block_bytes
        if folder.rank == 0:
            folder.make_files(plan.sizes)
        else:
            folder.wait_until_ready()
        writer = folder.writer(block_bytes)
        try:
            for path, data in plan.heads.items():
                writer.write_bytes(path, data)
            for chunk in plan.chunks:
                writer.write(chunk.path, chunk.begin, chunk.nbytes, partial(plan.snapshot.take, chunk))
            writer.finish()
        finally:
            writer.close()
        folder.report_done(writer.fragments)
        if self._destination is None:
            self._content = folder.wait_until_committed()
            return None
        fragments = folder.collect()
        sums: dict[str, FileSums] = {}
        for path, nbytes in plan.sizes.items():
            try:
                sums[path] = FileSums(nbytes, tuple(block_sums(fragments.get(path, ()), nbytes, block_bytes)))
            except ValueError as error:  # a byte was not written, or twice
                raise SaveError(f"{path}: {error}") from error
        folder.put_together(list(plan.sizes), fragments)
        manifest = replace(plan.manifest, files=sums)
        self._destination.commit(folder, manifest)
        self._content = manifest.content
        return manifest

    def _tidy(self, destination: Destination, manifest: Manifest) -> list[str]:
        try:
            return destination.tidy(self._folder, manifest)
        except Exception as error:  # the checkpoint is complete, whatever happens to older ones
            return [f"older checkpoints next to {self.path} could not be removed: {type(error).__name__}: {error}"]
