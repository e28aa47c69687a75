"""A folder of checkpoints: which steps it has, who may write there, which ones are kept.

Knows: names of folders, the lock, what a removal may touch. Does not know: how a checkpoint is written or read.

    .lock, .lease                      see `lock`
    step-00000100/                     exists if and only if it is complete
    .tmp-step-00000200-<nonce>/        a save under way, or one that a run has left
    .trash-step-00000050-<nonce>/      a checkpoint that is being removed or replaced
    .saved-<nonce>-<content>           a save of which other ranks may not know yet that it is complete
    abandoned-step-00000300-<nonce>/   a step that was above the one that the save of this nonce has made the newest

A save makes its step the newest. Before the rename that completes it, steps above it get their new names, which count
only when that save is no longer under way: so that rename decides about all of them at once.

Only rank 0 of the run that holds the lock renames and removes, and only what is known to be a checkpoint or a save:
every entry has a name that this library gives, none is a symbolic link. Everything else is left, and reported.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ...core.statetree import FormatError
from .. import files
from ..format.manifest import LONGEST, NAME, Manifest, VersionError
from ..format.names import COPIED, NOTES, copied_in
from .lock import FolderLock
from .visibility import PROBE

_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.tmp-(step-\d{8,})-([0-9a-f]{16})")
_TRASH = re.compile(r"\.trash-(step-\d{8,})-([0-9a-f]{16})")
_OURS = (
    re.compile(r"(model|optimizer|masters)(/\1-\d{5,}-of-\d{5,}\.safetensors|/\1\.safetensors\.index\.json)?"),
    re.compile(r"averages(/([^/]+)(/\2-\d{5,}-of-\d{5,}\.safetensors|/\2\.safetensors\.index\.json)?)?"),
    re.compile(r"ranks(/rank-\d{5,}\.safetensors)?"),
    re.compile(rf"state\.safetensors|{re.escape(NAME)}"),
    re.compile(rf"{NOTES}(/(nonce|copied|ready|failed|rank-\d{{5,}}\.(done|failed)|\.[a-z0-9.-]+\.part))?"),
    re.compile(r"parts(/rank-\d{5,})?"),
)
_ABANDONED = re.compile(r"abandoned-(step-\d{8,})-([0-9a-f]{16})")
_SAVED = re.compile(r"\.saved-([0-9a-f]{16})-[0-9a-f]{64}")


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises `FormatError` or `OSError` if there is no whole one."""
    return Manifest.from_bytes(files.read_whole(folder / NAME, LONGEST))


def is_complete(folder: Path) -> bool:
    """Return whether a folder is a checkpoint: its manifest is whole, and each file has its size."""
    try:
        manifest = read_manifest(folder)
        found = ((os.lstat(folder / path), sums.nbytes) for path, sums in manifest.files.items())
        return all(stat.S_ISREG(status.st_mode) and status.st_size == nbytes for status, nbytes in found)
    except VersionError:
        return True  # it cannot be read here, and is no broken one
    except (OSError, FormatError):
        return False


def steps_in(directory: Path) -> dict[int, Path]:
    """Return the folders of the steps, in ascending order.

    A step that was being replaced is in its trash folder. One that a save was about to set aside has its new name.
    """
    found: dict[int, Path] = {}
    moved: dict[int, Path] = {}
    under_way: set[str] = set()  # nonces of saves
    aside: list[tuple[int, str, Path]] = []
    with suppress(FileNotFoundError):
        for entry in directory.iterdir():
            if entry.is_symlink() or not entry.is_dir():
                continue
            if (step := _STEP.fullmatch(entry.name)) and entry.name == step_name(int(step[1])):
                found[int(step[1])] = entry
            elif (trash := _TRASH.fullmatch(entry.name)) and is_complete(entry):
                moved[_number(trash[1])] = entry
            elif temporary := _TEMPORARY.fullmatch(entry.name):
                under_way.add(temporary[2])
            elif abandoned := _ABANDONED.fullmatch(entry.name):
                aside.append((_number(abandoned[1]), abandoned[2], entry))
    moved.update((number, entry) for number, nonce, entry in aside if nonce in under_way)
    return dict(sorted({**moved, **found}.items()))


def _number(name: str) -> int:
    return int(name.removeprefix("step-"))


def set_aside(directory: Path, step: int) -> list[Path]:
    """Return the folders of a step that saves of lower steps have set aside."""
    return sorted(directory.glob(f"abandoned-{step_name(step)}-*"))


def complete_steps(directory: Path) -> list[int]:
    """Return the steps whose folders are complete, in ascending order."""
    return [step for step, folder in steps_in(directory).items() if is_complete(folder)]


class LockedDirectory(FolderLock):
    """A folder of checkpoints that this run alone writes to. Held by rank 0."""

    def __init__(self, directory: Path, nonce: str) -> None:
        """Create the folder if it is missing, and lock it. Raises `ValueError` if another run holds the lock."""
        self._unremoved: set[Path] = set()  # of this run
        files.make_folders(directory)
        super().__init__(directory, nonce)

    def close(self) -> None:
        """Give up the lock."""
        with suppress(OSError, RuntimeError, ValueError):
            self.remove([])
        super().close()

    def clean(self) -> list[str]:
        """Remove what earlier runs have left under way, and bring back a checkpoint that was being replaced.

        Returns, as text, what was left instead, and why.
        """
        left: list[str] = []
        for entry in sorted(self.path.iterdir()):
            try:
                left += self._clean(entry)
            except OSError as error:
                left.append(f"{entry} could not be removed ({error})")
        return left

    def _clean(self, entry: Path) -> list[str]:
        temporary, trash = _TEMPORARY.fullmatch(entry.name), _TRASH.fullmatch(entry.name)
        if temporary:
            self._bring_back(temporary[2])
        if _is_scratch(entry):
            files.remove(entry)
        elif trash and not entry.is_symlink() and is_complete(entry) and not os.path.lexists(self.path / trash[1]):
            files.rename(entry, self.path / trash[1])
            files.sync_folder(self.path)
        elif (trash and _has_manifest(entry)) or (temporary and _has_nonce(entry, temporary[2])):
            return remove_checkpoint(entry)
        elif trash or temporary:
            _remove_empty(entry)
            if os.path.lexists(entry):
                return [f"{entry} is left, because nothing in it shows that it is a checkpoint or a save"]
        return []

    def _bring_back(self, nonce: str) -> None:
        """Give the steps their names back that a save was about to set aside, which was not completed."""
        moved = [(found[1], entry) for entry in self.path.iterdir() if (found := _ABANDONED.fullmatch(entry.name))]
        moved = [(name, entry) for name, entry in moved if entry.name.endswith(nonce)]
        for name, entry in moved:
            if not os.path.lexists(self.path / name):
                files.rename(entry, self.path / name)
        if moved:
            files.sync_folder(self.path)  # before the folder of that save is removed

    def above(self, step: int, nonce: str) -> list[tuple[Path, Path]]:
        """Return the checkpoints of higher steps, with the names that they get if the save of ``nonce`` is complete."""
        found: list[tuple[Path, Path]] = []
        for number, folder in steps_in(self.path).items():
            if number > step and (is_complete(folder) or _has_manifest(folder)):
                home = self.path / step_name(number)
                if folder != home:  # a save that failed has left it under another name
                    self.check()
                    files.rename(folder, home)
                found.append((home, self.path / f"abandoned-{home.name}-{nonce}"))
        return found

    def remove(self, steps: Iterable[int]) -> list[str]:
        """Remove these steps. Return, as text, what was left instead. A crash leaves a trash folder for `clean`."""
        left: list[str] = []
        for trash in list(self._unremoved):
            left += self.remove_trash(trash)
        there = steps_in(self.path)
        for step in steps:
            if step not in there or there[step] in self._unremoved:
                continue  # its trash folder was whole, and is removed by now, or cannot be removed
            strange = foreign(there[step])
            if strange is not None:
                left.append(_has_foreign(there[step], strange))
                continue
            self.check()
            trash = self.path / f".trash-{step_name(step)}-{secrets.token_hex(8)}"
            files.rename(there[step], trash)
            left += self.remove_trash(trash)
        return left

    def remove_trash(self, trash: Path) -> list[str]:
        """Remove a folder that this run has renamed. If the disk fails, it is tried again later."""
        self.check()
        self._unremoved.add(trash)
        try:
            left = remove_checkpoint(trash) if os.path.lexists(trash) else []
        except OSError as error:
            return [f"{trash} could not be removed yet ({error})"]
        self._unremoved.discard(trash)
        return left

    def remove_announcements(self, but: str) -> None:
        """Remove what lets ranks see that saves are complete, of all saves but the one of this nonce."""
        for entry in list(self.path.iterdir()):
            found = _SAVED.fullmatch(entry.name)
            if found and found[1] != but and _is_scratch(entry):
                files.remove(entry)


def check_free(target: Path, *, overwrite: bool) -> None:
    """Raise `FileExistsError` if something exists that may not be replaced: only a checkpoint may."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists: overwrite=True replaces it")
    strange = foreign(target)
    if strange is not None:
        raise FileExistsError(f"{_has_foreign(target, strange)}: remove it yourself, or save elsewhere")


def foreign(folder: Path) -> str | None:
    """Return the first entry of a checkpoint's folder that is no part of it; None if there is none.

    The manifest has the names of its files. Without one, names of this library and those in a note are parts.
    """
    if folder.is_symlink() or not folder.is_dir():
        return str(folder)
    listed: set[str] | None = None
    copied: set[str] = set()
    with suppress(OSError):
        copied = copied_in(files.read_whole(folder / NOTES / COPIED, LONGEST))
    with suppress(OSError, FormatError):
        listed = {NAME, *read_manifest(folder).files}
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent) / name
            inside = path.relative_to(folder).as_posix()
            known = inside in copied or any(pattern.fullmatch(inside) for pattern in _OURS)
            if listed is not None and name in names and not inside.startswith(f"{NOTES}/"):
                known = inside in listed
            if path.is_symlink() or not known:
                return inside
    return None


def remove_checkpoint(folder: Path) -> list[str]:
    """Remove the folder of a checkpoint or of a save. Returns, as text, what was left, and why.

    If it has anything foreign, it is left.
    """
    strange = foreign(folder)
    if strange is not None:
        return [_has_foreign(folder, strange)]
    remove_all(folder)
    return []


def remove_all(folder: Path, *, but_notes: bool = False) -> None:
    """Remove a folder of this library's, as far as possible, and raise the first error then.

    What shows a later `clean` that it is one goes last, and stays if anything does. ``but_notes``: leave the notes.
    """
    notes = folder / NOTES
    marks = (notes / COPIED, notes / "nonce", notes, folder)
    failed: list[OSError] = []

    def attempt(call: Callable[[Path], None], path: Path) -> None:
        try:
            call(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            failed.append(error)

    for parent, _, names in os.walk(folder, topdown=False):
        if but_notes and Path(parent) == notes:
            continue
        for name in names:
            if Path(parent, name) not in (*marks, folder / NAME):
                attempt(files.remove, Path(parent, name))
        if Path(parent) not in marks:
            attempt(files.remove_folder, Path(parent))
    for mark in () if failed else (folder / NAME, *(() if but_notes else marks)):
        attempt(files.remove_folder if mark in (notes, folder) else files.remove, mark)
    if failed:
        raise failed[0]


def _has_foreign(folder: Path, strange: str) -> str:
    if strange == str(folder):
        return f"{folder} is left, because it is no folder"
    return f"{folder} is left, because it has {strange}, which is no part of a checkpoint"


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder has the manifest of a checkpoint, whatever else is missing."""
    with suppress(OSError, FormatError):
        read_manifest(folder)
        return True
    return False


def _has_nonce(folder: Path, nonce: str) -> bool:
    """Return whether a folder of a save is one of this library's: it has the note, or the manifest, of that nonce."""
    if folder.is_symlink():
        return False
    with suppress(OSError):
        return files.read_whole(folder / NOTES / "nonce", 64) == nonce.encode()
    with suppress(OSError, FormatError):
        return read_manifest(folder).written_by.get("nonce") == nonce
    return False


def _is_scratch(path: Path) -> bool:
    """Return whether this is a file of this library's that a run leaves beside checkpoints."""
    is_ours = _SAVED.fullmatch(path.name) or PROBE.fullmatch(path.name)
    return bool(is_ours) and stat.S_ISREG(os.lstat(path).st_mode)


def _remove_empty(folder: Path) -> None:
    """Remove a folder that a run has left before it wrote its nonce, or after all else was removed."""
    if not folder.is_symlink():
        for call, path in (
            (files.remove, folder / NOTES / ".nonce.part"),
            (files.remove_folder, folder / NOTES),
            (files.remove_folder, folder),
        ):
            with suppress(OSError):
                call(path)
