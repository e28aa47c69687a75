"""Which checkpoints of a folder are kept after a commit.

Knows: the rule. Does not know: how a checkpoint is removed. Runs on rank 0, in the thread of a save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .folder.directory import LockedDirectory, check_free, complete_steps, steps_in
from .format.manifest import Manifest
from .options import require
from .read.reader import open_checkpoint
from .write.save_folder import SaveFolder
from .write.save_thread import Destination


class Retention:
    """Keeps the newest checkpoints, and those of some steps for good.

    Beside the one that was just written, the newest that is left is whole: if it is of an earlier run, its blocks are
    read before, and if it is broken, nothing is removed after this save. A broken one is neither counted nor removed.
    """

    def __init__(self, max_to_keep: int | None, keep_period: int | None) -> None:
        """``max_to_keep``: how many; None: all. ``keep_period``: steps that it divides are kept for good.

        Raises `ValueError` if one of them is not positive.
        """
        for name, number in (("max_to_keep", max_to_keep), ("keep_period", keep_period)):
            whole = number is None or isinstance(number, int)
            require(whole and (number is None or number >= 1), f"{name} is {number!r}: it must be at least 1, or None")
        self._max_to_keep, self._keep_period = max_to_keep, keep_period
        self._whole: dict[int, bool] = {}  # of steps that were read, or written by this run
        self._kept: Callable[[int], bool] = lambda step: False  # of steps that must stay for now

    def note_whole(self, step: int) -> None:
        """Note that every block of a checkpoint was written by this run, or read."""
        self._whole[step] = True

    def keep_from(self, step: int | None) -> None:
        """Let this checkpoint and newer ones stay, whatever their number; None: all. It is the newest one that all
        parts of a model have."""
        self._kept = lambda other: step is None or other >= step

    def apply(self, directory: LockedDirectory, step: int) -> list[str]:
        """Remove what is not kept, after the commit of ``step``. Return, as text, what was left instead, and why."""
        self._whole[step] = True
        if self._max_to_keep is None:
            return directory.remove([])
        others = [
            other
            for other in reversed(complete_steps(directory.path))
            if other != step
            and self._whole.get(other, True)
            and (self._keep_period is None or other % self._keep_period)
        ]
        if self._max_to_keep > 1 and others and not self._is_whole(directory.path, others[0]):
            return directory.remove([])
        return directory.remove([other for other in others[self._max_to_keep - 1 :] if not self._kept(other)])

    def _is_whole(self, directory: Path, step: int) -> bool:
        if step not in self._whole:
            try:
                open_checkpoint(steps_in(directory)[step]).verify()
                self._whole[step] = True
            except (ValueError, OSError, KeyError):
                self._whole[step] = False
        return self._whole[step]


class StepDestination(Destination):
    """The folder of one step, in a locked folder with a rule of retention."""

    def __init__(
        self, target: Path, directory: LockedDirectory, retention: Retention, step: int, *, overwrite: bool
    ) -> None:
        super().__init__(target, overwrite=overwrite)
        self._directory, self._retention, self._step = directory, retention, step
        self._aside: list[Path] = []

    def check(self) -> None:
        check_free(steps_in(self._directory.path).get(self._step, self._target), overwrite=self._overwrite)
        self._directory.check()

    def commit(self, folder: SaveFolder, manifest: Manifest) -> None:
        above = self._directory.above(self._step, folder.nonce)
        folder.commit(manifest, self._overwrite, self._directory.check, above)
        self._aside = [place for _, place in above]

    def tidy(self, folder: SaveFolder, manifest: Manifest) -> list[str]:
        left = [_set_aside(folder.target, self._aside)] if self._aside else []
        if os.path.lexists(folder.trash):
            left += self._directory.remove_trash(folder.trash)
        left += self._retention.apply(self._directory, manifest.step)
        self._directory.remove_announcements(but=folder.nonce)  # every rank has seen how the saves before have ended
        return left


def _set_aside(newest: Path, folders: Sequence[Path]) -> str:
    names = ", ".join(folder.name for folder in folders)
    return (
        f"{newest} is the newest checkpoint now; what was there under higher steps is set aside in the same folder: "
        f"{names}; zero.load() and zero.open_checkpoint() read these by path, nothing removes them, and one that is "
        "renamed to its step is the newest again"
    )
