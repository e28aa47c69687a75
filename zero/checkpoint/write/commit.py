"""The rename that makes a folder the checkpoint, and what goes with it, on rank 0.

Knows: names of folders, how a commit that fails is undone, how other ranks see that it is done. Does not know: what is
in the folder, threads, messages, locks.

    .tmp-step-00000200-<nonce>/           complete and on the disk; the last rename makes it step-00000200
    step-00000200/                        if it is replaced: renamed to .trash-step-00000200-<nonce> before
    step-00000300/                        if it is set aside: renamed to abandoned-step-00000300-<nonce> before
    .saved-<nonce>-<content>              if there are other ranks: an empty file, made before

Whoever finds new names and the temporary folder knows that the commit is not done, and takes the folders by their old
names. So the last rename decides about all of them at once.

When the temporary folder is gone, a `.saved` file says to the other ranks that it was renamed, and with which content.
They read nothing for it. The file stays until every rank has seen it, so that the checkpoint itself may be moved or
removed as soon as any rank has returned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .. import files
from ..format.manifest import LONGEST, NAME


class Commit:
    """The commit of one save.

    Attributes:
        unsynced: why it may be lost if the machine crashes, although it is done; None if it is on the disk.
    """

    def __init__(self, temporary: Path, target: Path, nonce: str, *, announces: bool) -> None:
        """``announces``: whether there are other ranks."""
        self._temporary, self._target, self._nonce, self._announces = temporary, target, nonce, announces
        self._moved: list[tuple[Path, Path]] = []  # what was renamed, from and to, while the commit is not done
        self._announcement: Path | None = None  # while it exists
        self.unsynced: str | None = None

    def run(self, content: str, moves: Sequence[tuple[Path, Path]]) -> None:
        """Rename the folder, which is on the disk. If that fails, everything is as it was, as far as possible.

        ``content``: of the checkpoint. ``moves``: further folders, and the names that they get with it.
        """
        parent = self._target.parent
        try:
            if moves:
                files.sync_folder(parent)  # no new name is on the disk without the temporary folder
            for source, place in moves:
                self._moved.append((source, place))
                files.rename(source, place)
            if self._announces:
                self._announcement = self._target.with_name(f".saved-{self._nonce}-{content}")
                files.create(self._announcement, 0)
            files.sync_folder(parent)
            files.rename(self._temporary, self._target)
        except BaseException as error:
            if files.exists(self._temporary):
                self.take_back()
                raise
            self._moved.clear()
            if not isinstance(error, OSError) or nonce_and_content(self._target)[0] != self._nonce:
                raise  # else it was renamed: NFS may send a rename twice, and reports an error for the second one
        self._moved.clear()
        try:
            files.sync_folder(parent)
        except OSError as error:
            self.unsynced = (
                f"{self._target} is complete, but may be lost if the machine crashes, since {parent} could not be "
                f"synced ({error}): older checkpoints were kept"
            )

    def take_back(self) -> bool:
        """Undo what was done before the last rename, as far as possible. Return whether all is undone.

        Otherwise the temporary folder must stay: without it the commit seems to be done.
        """
        with suppress(OSError):
            for source, place in reversed(self._moved):
                if files.exists(place) and not files.exists(source):
                    files.rename(place, source)
            if self._moved:
                files.sync_folder(self._target.parent)
            self._moved.clear()
            self._withdraw()
        return not self._moved and self._announcement is None

    def _withdraw(self) -> None:
        if self._announcement is not None:
            with suppress(OSError):
                files.remove(self._announcement)
            if not files.exists(self._announcement):
                self._announcement = None


def trash_of(target: Path, nonce: str) -> Path:
    """Return the name of a checkpoint that the save of this nonce replaces."""
    return target.with_name(f".trash-{target.name}-{nonce}")


def announced_content(parent: Path, nonce: str) -> str | None:
    """Return the content that the save of this nonce has announced; None if there is no announcement."""
    prefix = f".saved-{nonce}-"
    return next((name.removeprefix(prefix) for name in os.listdir(parent) if name.startswith(prefix)), None)


def nonce_and_content(folder: Path) -> tuple[str, str]:
    """Return nonce and content of a checkpoint, which this run may have committed; two empty texts if there is none."""
    try:  # less is checked than by a reader: if the nonce is that of this run, it has just written the text
        found = json.loads(files.read_whole(folder / NAME, LONGEST))
        return found["written_by"]["nonce"], found["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", ""
