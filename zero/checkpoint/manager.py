"""`CheckpointManager`: the checkpoints of one training run in one folder.

Which checkpoints of a folder are kept after a commit.

Knows: the public calls, which save is under way, which checkpoints are kept. Does not know: how a save or a load works.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from collectives import Kind, Tag

from ..core.parameter_specs import Rename
from ..optimizer import ZeroOptimizer
from ..runtime.compiled_calls import untraced_methods
from .folder.directory import LockedDirectory, check_free, check_visible, complete_steps, is_ours, step_name, steps_in
from .folder.model_parts import ModelParts, marks_of
from .format.manifest import Manifest
from .options import check_step, parse_size, read_assets, require, warn_caller
from .read.loader import Differences, Resize
from .read.reader import open_checkpoint
from .read.restorer import Reshard, Restored, Restorer
from .sharded_optimizer import ShardedOptimizer
from .write.save_folder import SaveFolder
from .write.save_thread import Destination, Saving
from .write.saver import Saver, SaveRequest


class Steps(Destination):
    """The steps of a folder that rank 0 has locked: a save becomes one, and sets aside or removes others.

    Keeps the newest checkpoints, and those of some steps for good. Beside the one that was just written, the newest
    that is left is whole: if it is of an earlier run, its blocks are read before, and if it is broken, nothing is
    removed after this save. A broken one is neither counted nor removed.
    """

    def __init__(self, directory: LockedDirectory, max_to_keep: int | None, keep_period: int | None) -> None:
        """``max_to_keep``: how many; None: all. ``keep_period``: steps that it divides are kept for good."""
        self.directory = directory
        self._max_to_keep, self._keep_period = max_to_keep, keep_period
        self._whole: dict[int, bool] = {}  # of steps that were read, or written by this run
        self.keep_from = math.inf  # this checkpoint and newer ones stay: the newest one that all parts of a model have
        self._last: int | None = None  # the step that this run has restored or saved last
        self._back_to = 0  # the step above which checkpoints are none of this training, of the save under way
        self._aside: list[str] = []  # what it has set aside

    def goes_on_from(self, step: int) -> None:
        """Note that training goes on from a checkpoint, of which this run has written, or read, every block."""
        self._whole[step], self._last = True, step

    def check(self, folder: SaveFolder, step: int) -> None:
        self._back_to = step if self._last is None else min(step, self._last)  # the training may have gone back
        there = steps_in(self.directory.path).get(step)
        if there is None or folder.overwrite or step == self._back_to or not is_ours(there):  # else it is set aside
            check_free(there or folder.target, overwrite=folder.overwrite)
        self.directory.check()

    def commit(self, folder: SaveFolder, manifest: Manifest) -> None:
        replaced = manifest.step if folder.overwrite else None
        above = self.directory.above(self._back_to, folder.nonce, but=replaced)
        folder.commit(manifest, self.directory.check, above)
        self._aside = [place.name for _, place in above]
        self.goes_on_from(manifest.step)

    def tidy(self, folder: SaveFolder, manifest: Manifest) -> list[str]:
        left: list[str] = []
        if self._aside:
            left.append(
                f"{folder.target} is the newest checkpoint now; what was there of steps above {self._back_to} is set "
                f"aside in the same folder: {', '.join(self._aside)}; zero.load() and zero.open_checkpoint() read "
                "these by path, nothing removes them, and one that is renamed to its step, once no other folder has "
                "that name, counts again"
            )
        if folder.unsynced is not None:
            return [*left, folder.unsynced]
        left += self.directory.remove_trash(folder.trash)
        left += self.directory.remove(self._superfluous(manifest.step))
        self.directory.remove_announcements(but=folder.nonce)  # every rank has seen how the saves before have ended
        return left

    def _superfluous(self, step: int) -> list[int]:
        """Return the steps that are not kept after the commit of ``step``."""
        if self._max_to_keep is None:
            return []
        others = [
            other
            for other in reversed(complete_steps(self.directory.path))
            if other != step
            and self._whole.get(other, True)
            and (self._keep_period is None or other % self._keep_period)
        ]
        if self._max_to_keep > 1 and others and not self._is_whole(others[0]):
            return []
        return [other for other in others[self._max_to_keep - 1 :] if other < self.keep_from]

    def _is_whole(self, step: int) -> bool:
        if step not in self._whole:
            self._whole[step] = False
            with suppress(ValueError, OSError, KeyError):
                open_checkpoint(steps_in(self.directory.path)[step]).verify()
                self._whole[step] = True
        return self._whole[step]


_GRACE = 2.0  # seconds in which a save may still be completed after an error; a restart waits for it


@untraced_methods
class CheckpointManager:
    """Saves and restores checkpoints of one optimizer, with everything else that training needs, in one folder.

    Every rank builds one for its own optimizer, and makes every call. The bytes of a checkpoint depend neither on the
    number of ranks, nor on the stage or the bucket sizes, and it can be restored with any of these. As a ``with`` block
    it closes itself at the end.

    Attributes:
        directory: the folder, as an absolute path. If the optimizer's mesh is a part of a larger one, it is the folder
            of this part of the model.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        optimizer: ZeroOptimizer,
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        asynchronous: bool = True,
        max_shard_size: str | int = "5GB",
        assets: str | os.PathLike[str] | None = None,
    ) -> None:
        """Open a folder of checkpoints, and lock it. All ranks.

        Args:
            directory: the folder, which all ranks must see; it is created if it is missing.
            optimizer: the optimizer whose parameters and states are saved.
            max_to_keep: the number of checkpoints to keep, at least 1; None: all.
            keep_period: checkpoints whose step is a multiple of this number are never deleted.
            asynchronous: ``save`` returns at once, and a thread writes while training continues.
            max_shard_size: the largest safetensors file, in bytes or as "5GB", as in Hugging Face's libraries; a larger
                tensor gets its own file.
            assets: a folder whose files (``config.json``, a tokenizer's) are copied next to the model.

        Raises:
            ValueError: an argument is invalid, another run holds the lock, or a rank does not see the folder.
        """
        self._optimizer, self._parts, self._model_parts = optimizer, ShardedOptimizer(optimizer), ModelParts(optimizer)
        self.directory = self._model_parts.folder(Path(directory).absolute())
        self._asynchronous, self._assets = asynchronous, assets
        self._saver = Saver(optimizer)
        self._saving: Saving | None = None
        self._steps: Steps | None = None  # on rank 0
        self._closed = False
        self._broken: set[str] = set()  # names of checkpoints that a restore has found broken
        problem: Exception | None = None
        try:
            require(bool(os.fspath(directory)), "directory is empty: name a folder (the current one is '.')")
            for name, number in (("max_to_keep", max_to_keep), ("keep_period", keep_period)):
                is_valid = number is None or (isinstance(number, int) and number >= 1)
                require(is_valid, f"{name} is {number!r}: it must be at least 1, or None")
            self._max_shard_bytes = parse_size(max_shard_size)
            if optimizer.rank == 0:
                lock = LockedDirectory(self.directory, secrets.token_hex(8))
                self._steps = Steps(lock, max_to_keep, keep_period)
                for text in lock.clean():
                    warn_caller(text)
        except Exception as error:
            problem = error.with_traceback(None)  # which would hold the lock
        try:
            self._in_parts = check_visible(optimizer, self.directory, problem)
        except BaseException:
            self._release()
            raise
        self._parts.watchers.append(self)

    # -- save ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        *,
        blocking: bool = False,
        overwrite: bool = False,
    ) -> Saving:
        """Save a checkpoint. All ranks, with equal arguments, between two steps. Waits for the previous save.

        Args:
            step: the checkpoint's number, at least 0. It becomes the newest one: higher steps, and those above the one
                that was restored, are set aside, with a warning.
            state: what training needs besides the model and the optimizer, equal on all ranks: schedulers, a
                `GradScaler`, any object with ``state_dict``, and plain values. It can be restored at any number of
                ranks.
            rank_state: this rank's own state. It can be restored at the same number of ranks, or at another one by
                ``reshard``.
            blocking: return only when the checkpoint is complete.
            overwrite: replace an existing checkpoint of this step. One that `restore` found broken is always replaced.

        Returns:
            The save under way, a `zero.checkpoint.Saving`.

        Raises:
            RuntimeError, ValueError, TypeError: on every rank, if any rank cannot save or the arguments differ. No file
                was changed. A later failure appears as a warning in the next step, and as an error of `Saving.result`.
        """
        self._check_open()
        problem: Exception | None = None
        target, assets = self.directory, {}
        try:
            if self._saving is not None:
                self._saving.wait()
            if self._model_parts.name and self._steps is not None:  # until all parts have a newer one, theirs stays
                common = self._model_parts.common(marks_of(steps_in(self.directory)), may_differ=True)
                self._steps.keep_from = next(iter(common), 0)
            if self._saving is not None:
                for text in self._saving.news():
                    warn_caller(text)  # raises, perhaps on this rank alone, if warnings are errors
            check_step(step)
            target, assets = self.directory / step_name(step), read_assets(self._assets)
            overwrite = overwrite or target.name in self._broken
        except Exception as error:
            problem = error
        request = SaveRequest(
            target,
            step,
            state,
            rank_state,
            overwrite=overwrite,
            blocking=blocking or not self._asynchronous,
            max_shard_bytes=self._max_shard_bytes,
            assets=assets,
            in_parts=self._in_parts,
            mark=self._model_parts.mark,
            problem=problem,
        )
        before, saving = self._saving, self._saver.save(request, self._steps)
        self._saving = saving
        self._broken.discard(target.name)  # it is replaced once
        if before is not None:
            before.remove_rest()  # every rank has seen how it ended
        if request.blocking:
            saving.result()
            for text in saving.news():
                warn_caller(text)
        return saving

    # -- failures -----------------------------------------------------------------------------------------------------

    def before_step(self, reports: Sequence[Mapping[str, str]]) -> None:
        """Warn of a save that has failed on some rank. Called in each step. Internal."""
        for text in [] if self._saving is None else self._saving.hear(reports):
            warn_caller(text)

    def before_update(self, bucket: int) -> None:
        """Let a save under way keep what an update will change. Called before each update of a bucket. Internal."""
        if self._saving is not None:
            self._saving.before_update(bucket)

    # -- restore ------------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        *,
        optimizer: bool = True,
        rng: bool = True,
        reshard: Reshard | None = None,
        strict: bool = True,
        rename: Rename | None = None,
        resize: Resize | None = None,
    ) -> Restored | None:
        """Load a checkpoint that was saved at any stage and number of ranks. All ranks, between two steps.

        Args:
            step: the checkpoint's step; None: the newest one that is not broken, with a warning for each broken one.
            state: objects with ``load_state_dict``, under the keys with which they were saved.
            rank_state: the same, for this rank's own state.
            optimizer: also load the states and the options of the param groups; False: the model only.
            rng: restore this rank's random generators, if the checkpoint was saved on the same number of ranks.
            reshard: ``reshard(states, rank, world)`` builds this rank's own state from those of all ranks that saved.
            strict: True: every tensor of the model must be in the checkpoint and have its shape there, and the other
                way round. False: a tensor for which the checkpoint has nothing of its shape stays as it is, and its
                states begin as the class begins them; what else was saved is left out. The result names these.
            rename: saved names -> names of the model, for those that differ; None leaves a tensor out, its states too.
                A mapping, or a function of a saved name.
            resize: ``resize(name, saved shape, shape)`` is called for a tensor of another shape. True: the leading
                rows that both have are read, of its states and averages, too; new rows keep the model's values, and
                their states are 0 (a grown vocabulary). If a state of the class does not begin at 0, or has no such
                rows, all states of the tensor begin anew. Each rank reads its own part alone.

        Returns:
            What was restored, a `zero.checkpoint.Restored`; None if ``step`` is None and the folder has no checkpoint.

        Raises:
            RuntimeError: on every rank, if any rank has gradients that no step has used. Nothing has changed.
            ValueError: the checkpoint belongs to another model or optimizer, or it has no state under a key, or ranks
                pass other arguments, or a function among them raises. Nothing has changed.
            CheckpointError: the checkpoint is broken, or this step has none. Nothing has changed.
        """
        self._check_open()
        if self._saving is not None:
            self._saving.wait()
        allowed = Differences(strict, rename, resize)
        restorer = Restorer(
            self._optimizer, state, rank_state, optimizer_too=optimizer, rng=rng, reshard=reshard, allowed=allowed
        )
        restorer.parts = self._model_parts
        restored = restorer.restore(self.directory, step)
        self._broken.update(path.name for path in restorer.broken)
        if restored is not None and self._steps is not None:
            self._steps.goes_on_from(restored.step)
        return restored

    # -- facts --------------------------------------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order. Local."""
        return complete_steps(self.directory)

    def latest_step(self) -> int | None:
        """Return the newest step that has a checkpoint; None if there is none. Local."""
        return max(self.all_steps(), default=None)

    def wait_until_finished(self) -> None:
        """Wait until no save is under way; raise the error of the last one. Local; every rank must make the call."""
        if self._saving is not None:
            self._saving.result()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save under way, and release the lock. All ranks. Raises the error of the last save."""
        if self._closed:
            return
        saving = self._saving
        try:
            if saving is not None:
                transport = self._parts.transport
                if transport.broken:
                    saving.abandon(f"rank {self._optimizer.rank} has lost the other ranks", _GRACE)
                saving.wait()
                if not transport.broken:
                    outcomes = transport.exchange(saving.outcome(), Tag(Kind.EXCHANGE, "CheckpointManager.close()"))
                    saving.settle(outcomes)
                    saving.remove_rest()
        finally:
            self._release()
        if saving is not None and not saving.was_raised:
            saving.result()
            for text in saving.news():
                warn_caller(text)

    def _release(self) -> None:
        self._closed = True
        self._saver.withdraw()
        if self in self._parts.watchers:
            self._parts.watchers.remove(self)
        if self._steps is not None:
            self._steps.directory.close()
            self._steps = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error of the block, without the other ranks, which may be elsewhere.

        A save under way may still be completed then, if every rank writes its part within a few seconds.
        """
        if error is None:
            self.close()
            return
        try:
            if self._saving is not None:
                self._saving.abandon(f"rank {self._optimizer.rank} has left the block: {error!r:.200}", _GRACE)
                self._saving.wait()
        finally:
            self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this CheckpointManager is closed: build a new one")
