"""The folder of a checkpoint while it is written: one rename makes it the checkpoint.

Knows: folders, files, the notes that ranks leave for each other. Does not know: tensors, threads, messages.

    .tmp-step-00000200-<nonce>/     what follows, and all files of the checkpoint
        notes/nonce                 made by rank 0 with the folder: a later run knows the folder for one of these
        notes/copied                which files of `model/` are copies of the caller's, if any are
        notes/ready                 rank 0 has made every file, with room for it
        notes/rank-00000.done       the checksums of what the rank has written, which is on the disk
        notes/rank-00000.failed     why the rank could not
        notes/failed                why there will be no checkpoint

Ranks need no message for it, so a thread of each can do it while others train. A rank waits for another one as long as
something in the folder changes. If rank 0 gives up and cannot even leave a note, it removes the folder.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .. import files
from ..format.checksums import Fragment
from ..format.manifest import LONGEST, NAME, Manifest
from ..format.names import COPIED, NOTES, is_copied

_SHORTEST, _LONGEST = 0.001, 0.02  # seconds between two looks at the folder
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SaveError(RuntimeError):
    """A checkpoint could not be written. Training can go on, and older checkpoints are as they were."""


class GivenUpError(SaveError):
    """Rank 0 has given up, and could not leave the reason in the folder: the next agreement of the ranks names it."""


class LateError(SaveError):
    """Another rank did not do its part in time; that rank may know why."""


class SaveFolder:
    """One save, on one rank."""

    def __init__(self, target: Path, nonce: str, rank: int, world_size: int, timeout: float) -> None:
        """``target``: the checkpoint's folder. ``timeout``: seconds for which a rank waits while nothing changes."""
        self.target, self.nonce = target, nonce
        self.temporary = target.with_name(f".tmp-{target.name}-{nonce}")
        self.trash = target.with_name(f".trash-{target.name}-{nonce}")
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._abandoned: tuple[str, float] | None = None

    def abandon(self, why: str, after: float = 0.0) -> None:
        """Make every wait of this rank end with an error, ``after`` so many seconds. Any thread may call it."""
        self._abandoned = self._abandoned or (why, time.monotonic() + after)

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Create the folder. Raises `OSError`."""
        files.make_folder(self.temporary)
        files.make_folder(self.temporary / NOTES)
        files.put_note(self._note("nonce"), self.nonce.encode())

    def make_files(self, sizes: Mapping[str, int]) -> None:
        """Create all files with room for their bytes. Raises `SaveError` if the disk is full."""
        files.sync_file(self._note("nonce"))
        files.sync_folder(self.temporary / NOTES)
        files.sync_folder(self.temporary)
        if copied := [path for path in sizes if is_copied(path)]:
            files.put_note(self._note(COPIED), json.dumps(copied).encode())
            files.sync_file(self._note(COPIED))
            files.sync_folder(self.temporary / NOTES)
        for folder in _folders(sizes):
            files.make_folder(self.temporary / folder)
        try:
            for path, nbytes in sizes.items():
                files.create(self.temporary / path, nbytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            disk = os.statvfs(self.target.parent)
            raise SaveError(
                f"rank 0 could not save {self.target}: the disk is full ({error.strerror}): the checkpoint needs "
                f"{sum(sizes.values()):,} bytes, and {disk.f_bavail * disk.f_frsize:,} are free"
            ) from error
        files.put_note(self._note("ready"), b"")

    def collect(self) -> dict[str, list[Fragment]]:
        """Return the fragments of every file when all ranks are done. Raises `SaveError` if one has failed."""
        found: dict[str, list[Fragment]] = {}
        done: set[str] = set()

        def all_done() -> bool:
            for name in sorted(os.listdir(self.temporary / NOTES)):
                if name.endswith(".failed"):
                    raise SaveError((_read(self._note(name)) or b"").decode())
                if name.endswith(".done") and name not in done:
                    done.add(name)
                    for path, fragments in json.loads(_read(self._note(name)) or b"{}").items():
                        found.setdefault(path, []).extend(Fragment(*fragment) for fragment in fragments)
            return len(done) == self._world_size

        def missing() -> str:
            ranks = ", ".join(str(r) for r in range(self._world_size) if f"rank-{r:05d}.done" not in done)
            return f"rank {ranks} did not write its part of {self.target} in time"

        self._wait(all_done, missing)
        return found

    def commit(self, manifest: Manifest, overwrite: bool, check: Callable[[], None]) -> None:
        """Make the folder the checkpoint. ``check``: raises if this run may not write here any more.

        Every file and every entry is on the disk before the rename, and the rename before this returns.
        """
        files.write_new(self.temporary / NAME, manifest.to_bytes())
        files.sync_files([self.temporary / path for path in manifest.files])
        for folder in (*_folders(manifest.files), Path()):
            files.sync_folder(self.temporary / folder)
        for note in sorted((self.temporary / NOTES).iterdir()):  # after a crash the manifest names the nonce now
            files.remove(note)
        files.remove_folder(self.temporary / NOTES)
        files.sync_folder(self.temporary)
        check()
        replaces = os.path.lexists(self.target)
        if replaces:
            if not overwrite:
                raise SaveError(f"rank 0 could not save {self.target}: it exists by now, another run has made it")
            files.rename(self.target, self.trash)
        try:
            files.sync_folder(self.target.parent)
            files.rename(self.temporary, self.target)
        except OSError:
            if replaces:
                files.rename(self.trash, self.target)
            raise
        try:
            files.sync_folder(self.target.parent)
        except OSError as error:
            raise SaveError(
                f"rank 0 could not sync {self.target.parent} ({error}): {self.target} is complete, but may be lost if "
                "the machine crashes"
            ) from error

    def give_up(self, why: str) -> None:
        """Leave the reason for the other ranks, and remove everything else. Raises nothing."""
        told = self._leave(why)
        self._remove(keep_notes=True)
        if not told and not self._leave(why):  # by now there may be room
            self._remove()

    def remove_rest(self) -> None:
        """Remove what `give_up` has left. No rank may be waiting for this save any more."""
        self._remove()

    def _leave(self, why: str) -> bool:
        if not self.temporary.exists():
            return False
        with suppress(OSError):
            files.make_folder(self.temporary / NOTES)
        try:
            files.put_note(self._note("failed"), why.encode())
        except OSError:
            return False
        return True

    def _remove(self, *, keep_notes: bool = False) -> None:
        """Remove the folder, as far as that is possible; the notes last, by which a later run knows it."""
        notes = self.temporary / NOTES
        for parent, _, names in os.walk(self.temporary, topdown=False):
            if Path(parent) != notes:
                for name in names:
                    _try(files.remove, Path(parent, name))
                if Path(parent) != self.temporary:
                    _try(files.remove_folder, Path(parent))
        if not keep_notes:
            names = os.listdir(notes) if notes.is_dir() else []
            for name in sorted(names, key=lambda name: name == "nonce"):
                _try(files.remove, notes / name)
            _try(files.remove_folder, notes)
            _try(files.remove_folder, self.temporary)

    # -- every rank ---------------------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Return when rank 0 has made all files. Raises `SaveError`."""

        def ready() -> bool:
            self.check()
            return self._note("ready").exists()

        self._wait(ready, lambda: f"rank 0 did not make the files of {self.target} in time")

    def report_done(self, fragments: Mapping[str, Sequence[Fragment]]) -> None:
        """Leave the checksums of what this rank has written."""
        told = {path: [(f.begin, f.length, f.crc32) for f in found] for path, found in fragments.items()}
        files.put_note(self._note(f"rank-{self._rank:05d}.done"), json.dumps(told).encode())

    def report_failed(self, why: str) -> None:
        """Leave the reason why this rank could not write its part. If even this fails, rank 0 learns it otherwise."""
        with suppress(OSError):
            files.put_note(self._note(f"rank-{self._rank:05d}.failed"), why.encode())

    def wait_until_committed(self) -> str:
        """Return the checkpoint's ``content`` when rank 0 has committed, and the rename is synced. Raises `SaveError`.

        This rank syncs, too, since rank 0 may die in between. If that fails, rank 0 decides how the save has ended.
        """
        found: list[str] = []

        def committed() -> bool:
            self._check_note()
            if self.temporary.exists():
                return False
            nonce, content = _committed(self.target)
            if nonce != self.nonce:
                raise self._given_up()
            found.append(content)
            return True

        self._wait(committed, lambda: f"rank 0 did not commit {self.target} in time")
        _try(files.sync_folder, self.target.parent)
        return found[0]

    def check(self) -> None:
        """Raise `SaveError` if rank 0 has given up."""
        self._check_note()
        if not self.temporary.exists():
            raise self._given_up()

    def _check_note(self) -> None:
        why = _read(self._note("failed"))
        if why is not None:
            raise SaveError(why.decode())

    def _given_up(self) -> SaveError:
        if self._abandoned is not None:
            return SaveError(self._abandoned[0])
        return GivenUpError(f"rank 0 has given up saving {self.target}")

    def _note(self, name: str) -> Path:
        return self.temporary / NOTES / name

    def _wait(self, holds: Callable[[], bool], late: Callable[[], str]) -> None:
        begin = look = time.monotonic()
        newest, end = -1, begin + self._timeout
        while not holds():
            now = time.monotonic()
            if self._abandoned is not None and now >= self._abandoned[1]:
                raise SaveError(self._abandoned[0])
            if now >= look:
                seen, look = self._newest(), now + self._timeout / 10
                if seen != newest:
                    newest, end = seen, now + self._timeout
            if now >= end:
                raise LateError(f"{late()} ({self._timeout:g} s)")
            time.sleep(min(max(_SHORTEST, (now - begin) / 20), _LONGEST))  # late by a twentieth at most

    def _newest(self) -> int:
        """Return when the folder has changed last, in ns of the disk's clock."""
        newest = 0
        for parent, _, names in os.walk(self.temporary):
            for path in (parent, *(f"{parent}/{name}" for name in names)):
                with suppress(OSError):
                    newest = max(newest, os.lstat(path).st_mtime_ns)
        return newest


def _folders(paths: Iterable[str]) -> list[Path]:
    """Return the folders of relative paths, outer ones first."""
    found = {parent for path in paths for parent in Path(path).parents if parent != Path()}
    return sorted(found, key=lambda folder: (len(folder.parts), folder))


def _try(call: Callable[[Path], None], path: Path) -> None:
    with suppress(OSError):
        call(path)


def _committed(folder: Path) -> tuple[str, str]:
    """Return nonce and content of a checkpoint, which this run may have committed; two empty texts if there is none."""
    try:  # less is checked than by a reader: if the nonce is that of this run, it has just written the text
        found = json.loads(files.read_whole(folder / NAME, LONGEST))
        return found["written_by"]["nonce"], found["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def _read(path: Path) -> bytes | None:
    try:
        return files.read_whole(path, LONGEST)
    except FileNotFoundError:
        return None
