"""The folder of a checkpoint while it is written: one rename makes it the checkpoint.

    .tmp-step-00000200-<nonce>/     what follows, and all files of the checkpoint
        notes/nonce                 made by rank 0 with the folder: a later run knows the folder for one of these
        notes/copied                which files of `model/` are copies of the caller's, if any are
        notes/ready                 rank 0 has made every file, with room for it
        notes/rank-00000.done       the checksums of what the rank has written, which is on the disk
        notes/rank-00000.failed     why the rank could not
        notes/failed                why there will be no checkpoint
        parts/rank-00000 ...        see below
    step-00000200/                  if it is replaced: renamed to .trash-step-00000200-<nonce> before
    step-00000300/                  if it is set aside: renamed to abandoned-step-00000300-<nonce> before
    .saved-<nonce>-<content>        if there are other ranks: an empty file, made before

Ranks need no message for it, so a thread of each can do it while others train. A rank waits for another one as long as
something in the folder changes. If rank 0 gives up and cannot even leave a note, it removes the folder.

Whoever finds new names and the temporary folder knows that the commit is not done, and takes the folders by their old
names. So the last rename decides about all of them at once.

Rank 0 knows how a save has ended. When the temporary folder is gone, the `.saved` file says to the other ranks that it
was renamed, and with which content. They read nothing for it. The file stays until every rank has seen it, so that the
checkpoint itself may be moved or removed as soon as any rank has returned.

Writes the chunks of one rank into files, and forms their checksums.

    parts/rank-00000, parts/rank-00001, ...      there: the chunks of each rank, one after the other; rank 0 makes the
                                                 files of the checkpoint from them

A chunk passes through one page-aligned buffer. Its whole pages are written past the kernel's page cache (O_DIRECT),
which takes a fifth of the CPU time; its ragged ends, and everything on a file system that refuses, through the cache.
The checksum is that of the buffer, so it is that of what was written.

Knows: folders, files, chunks, the notes that ranks leave for each other, how a commit that fails is undone. Does not
know: tensors, messages, locks.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint import files
from ..folder.directory import remove_all
from ..format.manifest import COPIED, LONGEST, NAME, NOTES, Manifest, is_copied
from ..format.tensorfile import PAGE, Fragment, split

PARTS = "parts"
SMALLEST_DIRECT = 64 * 1024  # below, two system calls cost more than the copy into the cache


class ChunkWriter:
    """Writes each chunk at its place in its file, file after file. They are on the disk after `finish`."""

    _path: str | None = None
    _file = _direct = -1

    def __init__(self, folder: Path, rank: int, block_bytes: int) -> None:
        """``folder``: of the save. ``block_bytes``: of the largest chunk."""
        self._folder, self._rank, self._block_bytes = folder, rank, block_bytes
        self._memory = mmap.mmap(-1, block_bytes + PAGE)
        self._view = memoryview(self._memory)
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._open = ExitStack()
        self.fragments: dict[str, list[Fragment]] = {}
        self.nbytes = 0

    def write(self, path: str, begin: int, nbytes: int, fill: Callable[[Tensor], None]) -> None:
        """Write ``nbytes`` at ``begin`` of the file ``path``. ``fill``: puts the bytes into a 1-D uint8 tensor."""
        place = begin % PAGE
        fill(self._buffer[place : place + nbytes])
        data = self._view[place : place + nbytes]
        fragment = Fragment(begin, nbytes, zlib.crc32(data), self._rank, self.nbytes)
        self.fragments.setdefault(path, []).append(fragment)
        self._put(path, begin, data)
        self.nbytes += nbytes

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write the first bytes of the file ``path``."""
        for begin, end in split(0, len(data), self._block_bytes):
            self.write(path, begin, end - begin, partial(_copy, data[begin:end]))

    def finish(self) -> None:
        """Wait until all that was written is on the disk."""
        files.sync_files([self._folder / path for path in self.fragments])

    def close(self) -> None:
        """Close what is open. Called also after an error."""
        self._open.close()
        del self._buffer
        self._view.release()

    def _put(self, path: str, begin: int, data: memoryview) -> None:
        """Write the bytes of a chunk."""
        if path != self._path:
            self._begin(path)
        low = -(-begin // PAGE) * PAGE
        high = (begin + len(data)) // PAGE * PAGE
        if self._direct < 0 or high - low < SMALLEST_DIRECT:
            files.write_at(self._file, data, begin)
            return
        try:
            files.write_at(self._direct, data[low - begin : high - begin], low)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this file system asks for another alignment
                raise
            self._direct = -1
            files.write_at(self._file, data, begin)
            return
        files.write_at(self._file, data[: low - begin], begin)
        files.write_at(self._file, data[high - begin :], high)

    def _begin(self, path: str) -> None:
        self._open.close()
        self._path, self._direct = path, -1
        self._file = self._open.enter_context(files.opened(self._folder / path))
        if files.DIRECT:
            with suppress(OSError):  # not on this file system
                self._direct = self._open.enter_context(files.opened(self._folder / path, os.O_WRONLY | files.DIRECT))


class PartWriter(ChunkWriter):
    """Writes chunks one after the other into a new file."""

    def __init__(self, folder: Path, rank: int, block_bytes: int) -> None:
        super().__init__(folder, rank, block_bytes)
        self._file = self._open.enter_context(files.opened(folder / part_of(rank), files.NEW))

    def _put(self, path: str, begin: int, data: memoryview) -> None:
        files.write_at(self._file, data, self.nbytes)

    def finish(self) -> None:
        files.sync(self._file)


def part_of(rank: int) -> str:
    """Return the path of a rank's part in the folder of a save."""
    return f"{PARTS}/rank-{rank:05d}"


def _copy(source: bytes, out: Tensor) -> None:
    out.copy_(torch.frombuffer(bytearray(source), dtype=torch.uint8))


_SHORTEST, _LONGEST = 0.001, 0.02  # seconds between two looks at the folder
_BLIND = 1.0  # seconds for which a rank tries again to look at a folder that it cannot read
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SaveError(RuntimeError):
    """A checkpoint could not be written. Training can go on, and older checkpoints are as they were."""


class UnseenError(SaveError):
    """This rank has done its part, and cannot see how the save has ended: rank 0 knows."""


class GivenUpError(SaveError):
    """Rank 0 has given up, and could not leave the reason in the folder: the next agreement of the ranks names it."""


class LateError(SaveError):
    """Another rank did not do its part in time; that rank may know why."""


class SaveFolder:
    """One save, on one rank."""

    def __init__(
        self,
        target: Path,
        nonce: str,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        overwrite: bool = False,
        in_parts: bool = False,
    ) -> None:
        """``target``: the checkpoint's folder. ``timeout``: seconds for which a rank waits while nothing changes.

        ``overwrite``: a checkpoint that exists is replaced. ``in_parts``: ranks cannot write into one file.
        """
        self.target, self.nonce, self.rank, self.overwrite = target, nonce, rank, overwrite
        self.temporary = target.with_name(f".tmp-{target.name}-{nonce}")
        self.trash = target.with_name(f".trash-{target.name}-{nonce}")
        self.unsynced: str | None = None  # why the commit may be lost if the machine crashes
        self._world_size, self._timeout, self._in_parts = world_size, timeout, in_parts
        self._moved: list[tuple[Path, Path]] = []  # what was renamed, from and to, while the commit is not done
        self._announcement: Path | None = None  # while it exists
        self._abandoned: tuple[str, float] | None = None

    def abandon(self, why: str, after: float = 0.0) -> None:
        """Make every wait of this rank end with an error, ``after`` so many seconds. Any thread may call it."""
        self._abandoned = self._abandoned or (why, time.monotonic() + after)

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Create the folder. Raises `OSError`."""
        files.make_folder(self.temporary)
        files.make_folder(self.temporary / NOTES)
        files.put_note(self._note("nonce"), self.nonce.encode(), synced=self._in_parts)

    def make_files(self, sizes: Mapping[str, int]) -> None:
        """Create all files with room for their bytes. Raises `SaveError` if the disk is full."""
        if not self._in_parts:  # else it was synced at once, since it cannot be opened again to be written
            files.sync_file(self._note("nonce"))
        if copied := [path for path in sizes if is_copied(path)]:
            files.put_note(self._note(COPIED), json.dumps(copied).encode(), synced=True)
        files.sync_folder(self.temporary / NOTES)
        files.sync_folder(self.temporary)
        for folder in (*_folders(sizes), *([Path(PARTS)] if self._in_parts else [])):
            files.make_folder(self.temporary / folder)
        now = {} if self._in_parts else sizes
        try:
            for path, nbytes in now.items():
                files.create(self.temporary / path, nbytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise SaveError(
                f"rank 0 could not save {self.target}: the disk is full ({error.strerror}): the checkpoint needs "
                f"{sum(sizes.values()):,} bytes{_free(self.target.parent)}"
            ) from error
        files.put_note(self._note("ready"), b"")

    def collect(self) -> dict[str, list[Fragment]]:
        """Return the fragments of every file when all ranks are done. Raises `SaveError` if one has failed."""
        found: dict[str, list[Fragment]] = {}
        missing = {f"rank-{rank:05d}.done": str(rank) for rank in range(self._world_size)}

        def all_done() -> bool:
            for name in sorted(os.listdir(self.temporary / NOTES)):
                if name.endswith(".failed"):
                    raise SaveError(files.read_whole(self._note(name), LONGEST).decode())
                if missing.pop(name, None) is not None:
                    for path, fragments in json.loads(files.read_whole(self._note(name), LONGEST)).items():
                        found.setdefault(path, []).extend(Fragment(*fragment) for fragment in fragments)
            return not missing

        self._wait(
            all_done, lambda: f"rank {', '.join(missing.values())} did not write its part of {self.target} in time"
        )
        return found

    def put_together(self, paths: Sequence[str], fragments: Mapping[str, Sequence[Fragment]]) -> None:
        """Make the files of the checkpoint from the parts of all ranks, if there are any, and remove these. The files
        are on the disk then.

        Raises `OSError` also if a part does not have the bytes that its rank has written.
        """
        if not self._in_parts:
            return
        with ExitStack() as opening:
            parts = [
                opening.enter_context(files.read_only(self.temporary, part_of(rank)))
                for rank in range(self._world_size)
            ]
            for path in paths:
                with files.opened(self.temporary / path, files.NEW) as number:
                    for fragment in sorted(fragments.get(path, ())):
                        data = memoryview(bytearray(fragment.length))
                        files.read_at(parts[fragment.rank], data, fragment.place)
                        if zlib.crc32(data) != fragment.crc32:
                            part = self.temporary / part_of(fragment.rank)
                            raise OSError(f"{part} does not have what its rank has written")
                        files.write_at(number, data, fragment.begin)
                    files.sync(number)
        for part in (self.temporary / PARTS).iterdir():
            files.remove(part)
        files.remove_folder(self.temporary / PARTS)

    def commit(self, manifest: Manifest, check: Callable[[], None], aside: Sequence[tuple[Path, Path]] = ()) -> None:
        """Make the folder the checkpoint.

        Every file and every entry is on the disk before the rename, and the rename before this returns.

        Args:
            manifest: of all files.
            check: raises if this run may not write here any more.
            aside: further folders that are renamed if and only if this one becomes the checkpoint, with their new
                names. Until then `directory.steps_in` takes them by their old names.
        """
        files.write_new(self.temporary / NAME, manifest.to_bytes())
        if not self._in_parts:
            files.sync_files([self.temporary / path for path in manifest.files])
        for folder in (*_folders(manifest.files), Path()):
            files.sync_folder(self.temporary / folder)
        for note in sorted((self.temporary / NOTES).iterdir()):  # after a crash the manifest names the nonce now
            files.remove(note)
        files.remove_folder(self.temporary / NOTES)
        files.sync_folder(self.temporary)
        check()
        replaced = [(self.target, self.trash)] if self.target not in dict(aside) and files.exists(self.target) else []
        if replaced and not self.overwrite:
            raise SaveError(f"rank 0 could not save {self.target}: it exists by now, another run has made it")
        self._rename(manifest.content, [*aside, *replaced])

    def _rename(self, content: str, moves: Sequence[tuple[Path, Path]]) -> None:
        """Rename the folder, which is on the disk. If that fails, everything is as it was, as far as possible.

        ``content``: of the checkpoint. ``moves``: further folders, and the names that they get with it.
        """
        parent = self.target.parent
        try:
            if moves:
                files.sync_folder(parent)  # no new name is on the disk without the temporary folder
            for source, place in moves:
                self._moved.append((source, place))
                files.rename(source, place)
            if self._world_size > 1:
                self._announcement = self.target.with_name(f".saved-{self.nonce}-{content}")
                files.create(self._announcement, 0)
            files.sync_folder(parent)
            files.rename(self.temporary, self.target)
        except BaseException as error:
            if files.exists(self.temporary):
                self._take_back()
                raise
            if not isinstance(error, OSError) or _nonce_and_content(self.target)[0] != self.nonce:
                raise  # else it was renamed: NFS may send a rename twice, and reports an error for the second one
        try:
            files.sync_folder(parent)
        except OSError as error:
            self.unsynced = (
                f"{self.target} is complete, but may be lost if the machine crashes, since {parent} could not be "
                f"synced ({error}): older checkpoints were kept"
            )

    def _take_back(self) -> bool:
        """Undo what was done before the last rename, as far as possible. Return whether all is undone.

        Otherwise the temporary folder must stay: without it the commit seems to be done.
        """
        with suppress(OSError):
            if self._moved and files.exists(self.temporary):  # else the commit is done
                for source, place in reversed(self._moved):
                    if files.exists(place) and not files.exists(source):
                        files.rename(place, source)
                files.sync_folder(self.target.parent)
            self._moved.clear()
            if self._announcement is not None and files.exists(self._announcement):
                files.remove(self._announcement)
            self._announcement = None
        return not self._moved and self._announcement is None

    def fail(self, why: str) -> None:
        """Leave the reason why this rank has failed, if that is possible. Rank 0 removes all else."""
        if self.rank != 0:
            with suppress(OSError):
                files.put_note(self._note(f"rank-{self.rank:05d}.failed"), why.encode())
            return
        told = self._leave(why)
        self._remove(but_notes=True)
        if not told and not self._leave(why) and self._take_back():  # by now there may be room
            self._remove()

    def remove_rest(self) -> None:
        """Remove all that is left beside a checkpoint. No rank may be waiting for this save any more."""
        if self._take_back() and files.exists(self.temporary):
            self._remove()

    def _leave(self, why: str) -> bool:
        if not files.exists(self.temporary):
            return False
        with suppress(OSError):
            files.make_folder(self.temporary / NOTES)
        try:
            files.put_note(self._note("failed"), why.encode())
            if not files.exists(self._note("nonce")):  # a commit has removed it: a later run would not know the folder
                files.put_note(self._note("nonce"), self.nonce.encode())
        except OSError:
            return False
        return True

    def _remove(self, *, but_notes: bool = False) -> None:
        """Remove the folder, as far as that is possible."""
        with suppress(OSError):
            remove_all(self.temporary, but_notes=but_notes)

    # -- every rank ---------------------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Return when rank 0 has made all files. Raises `SaveError`."""

        def ready() -> bool:
            self.check()
            return self._note("ready").exists()

        self._wait(ready, lambda: f"rank 0 did not make the files of {self.target} in time")

    def writer(self, block_bytes: int) -> ChunkWriter:
        """Return what writes this rank's chunks."""
        return (PartWriter if self._in_parts else ChunkWriter)(self.temporary, self.rank, block_bytes)

    def report_done(self, fragments: Mapping[str, Sequence[Fragment]]) -> None:
        """Leave the checksums of what this rank has written."""
        told = {path: [list(vars(fragment).values()) for fragment in found] for path, found in fragments.items()}
        files.put_note(self._note(f"rank-{self.rank:05d}.done"), json.dumps(told).encode())

    def wait_until_committed(self) -> str:
        """Return the checkpoint's ``content`` when rank 0 has renamed the folder. Raises `SaveError`.

        Raises `UnseenError` if it cannot be seen. This rank syncs the rename, too, since rank 0 may die before it does.
        """
        found: list[str] = []
        blind: float | None = None  # since when every look has failed

        def committed() -> bool:
            nonlocal blind
            try:
                if files.exists(self.temporary):
                    self._check_note()
                else:
                    found.append(self._announced())
                blind = None
            except OSError as error:
                blind = time.monotonic() if blind is None else blind
                if time.monotonic() - blind > _BLIND:
                    raise UnseenError(f"{self._cannot_see()}: {type(error).__name__}: {error}") from error
            return bool(found)

        self._wait(committed, lambda: f"{self._cannot_see()}: rank 0 did not commit it in time", UnseenError)
        with suppress(OSError):
            files.sync_folder(self.target.parent)
        return found[0]

    def _announced(self) -> str:
        """Return the content that rank 0 has announced. The temporary folder is gone. Raises `OSError`, `SaveError`."""
        prefix = f".saved-{self.nonce}-"
        for name in os.listdir(self.target.parent):
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        nonce, content = _nonce_and_content(self.target)
        if nonce != self.nonce:
            raise self._given_up()
        return content

    def _cannot_see(self) -> str:
        return f"rank {self.rank} cannot see whether {self.target} is complete, which rank 0 knows"

    def check(self) -> None:
        """Raise `SaveError` if rank 0 has given up."""
        self._check_note()
        if not files.exists(self.temporary):
            raise self._given_up()

    def _check_note(self) -> None:
        if files.exists(self._note("failed")):
            with suppress(OSError):
                raise SaveError(files.read_whole(self._note("failed"), LONGEST).decode())
            raise self._given_up()

    def _given_up(self) -> SaveError:
        if self._abandoned is not None:
            return SaveError(self._abandoned[0])
        return GivenUpError(f"rank 0 has given up saving {self.target}")

    def _note(self, name: str) -> Path:
        return self.temporary / NOTES / name

    def _wait(self, holds: Callable[[], bool], late: Callable[[], str], error: type[SaveError] = LateError) -> None:
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
                raise error(f"{late()} ({self._timeout:g} s)")
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


def _free(folder: Path) -> str:
    with suppress(OSError):
        disk = os.statvfs(folder)
        return f", and {disk.f_bavail * disk.f_frsize:,} are free"
    return ""


def _nonce_and_content(folder: Path) -> tuple[str, str]:
    """Return nonce and content of a checkpoint, which this run may have committed; two empty texts if there is none."""
    try:  # less is checked than by a reader: if the nonce is that of this run, it has just written the text
        found = json.loads(files.read_whole(folder / NAME, LONGEST))
        return found["written_by"]["nonce"], found["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", ""
