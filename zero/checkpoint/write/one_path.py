"""A checkpoint at a path of its own, without a folder of steps: no lock, and nothing older to keep.

Knows: one path. Does not know: how a checkpoint is written.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..folder.directory import check_free, remove_checkpoint
from ..format.manifest import NAME, Manifest
from .save_folder import SaveFolder


class OnePath:
    """The path of one checkpoint; see `Destination`."""

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        self._target, self._overwrite = target, overwrite

    def check(self) -> None:
        check_free(self._target, overwrite=self._overwrite)
        if self._target.is_dir() and not os.path.lexists(self._target / NAME) and any(self._target.iterdir()):
            raise FileExistsError(f"{self._target} is no checkpoint, since it has no {NAME}: save elsewhere")

    def commit(self, folder: SaveFolder, manifest: Manifest) -> None:
        folder.commit(manifest, self._overwrite, lambda: None)

    def tidy(self, folder: SaveFolder, manifest: Manifest) -> list[str]:
        return remove_checkpoint(folder.trash) if os.path.lexists(folder.trash) else []
