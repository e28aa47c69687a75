"""A folder of checkpoints: which steps it has, who may write there, which ones are kept.

    .lock, .lease                      see below
    step-00000100/                     exists if and only if it is complete
    .tmp-step-00000200-<nonce>/        a save under way, or one that a run has left
    .trash-step-00000050-<nonce>/      a checkpoint that is being removed or replaced
    .saved-<nonce>-<content>           a save of which other ranks may not know yet that it is complete
    abandoned-step-00000300-<nonce>/   a step that the save of this nonce has set aside

A save makes its step the newest. Before the rename that completes it, steps above it, or above the one from which the
training went on, get their new names, which count only when that save is no longer under way: so that rename decides
about all of them at once.

Only rank 0 of the run that holds the lock renames and removes, and only what is known to be a checkpoint or a save:
every entry has a name that this library gives, none is a symbolic link. Everything else is left, and reported.

The lock of a folder of checkpoints: one run holds it, and every other one is refused.

    .lock      locked by the kernel (flock) for the run that writes here; has the text of its `Holder`
    .lease     where the file system has no locks: created by that run, which removes it when it ends; same text

The probe of a folder: all ranks see it, what they write into one file side by side stays, and what else a file system
may lack.

Knows: names of folders, locks, what a removal may touch, what a file system shows to other ranks. Does not know: how a
checkpoint is written or read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint import files
from ...core.statetree import FormatError
from ...optimizer import ZeroOptimizer
from ..format.manifest import COPIED, LONGEST, NAME, NOTES, Manifest, VersionError, copied_in
from ..options import warn_caller

LOCK, LEASE = ".lock", ".lease"
_GONE = 0.5  # seconds after which a lock is free, or has the text of a new holder, if its holder has ended
_PAUSE = 0.05  # seconds between two tries
_LONGEST = 4096  # bytes of the text of a holder


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host, pid: of the process; nonce: of its run.
        started: in ticks since the boot of its host.
        system: the boot of its host and its namespace of pids, since several hosts and containers may have one name.
    """

    host: str = ""
    pid: int = 0
    nonce: str = ""
    started: int = 0
    system: str = ""

    @classmethod
    def me(cls, nonce: str) -> Holder:
        return cls(socket.gethostname(), os.getpid(), nonce, _start_of(os.getpid()), _system())

    @classmethod
    def unpack(cls, text: bytes) -> Holder:
        """Read what `pack` has written; any other text makes a holder without a host."""
        try:
            found = json.loads(text)
            known = (str(found["host"]), int(found["pid"]), str(found["nonce"]))
            return cls(*known, int(found.get("started", 0)), str(found.get("system", "")))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def has_ended(self) -> bool:
        """Return whether the process has certainly ended."""
        is_here = self.host and (self.host, self.system) == (socket.gethostname(), _system())
        return bool(is_here and self.started) and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        if not self.host:
            return "another run"
        me = (self.pid, self.host) == (os.getpid(), socket.gethostname())
        which = " (this process: a CheckpointManager that was not closed)" if me else ""
        return f"pid {self.pid} on host {self.host}{which}"


class _Lease:
    """A file in the place of a lock. It outlives a process that is killed."""

    def __init__(self, path: Path, me: Holder) -> None:
        self.path, self._me = path, me
        self.remedy = (
            f"; this file system has no locks, so that nothing shows whether it has ended: if it has, remove {path}"
        )

    def take(self) -> bool:
        """Take the lease if there is none, or if its holder has certainly ended. Return whether this run holds it."""
        if self.holder().has_ended():
            with suppress(FileNotFoundError):
                files.remove(self.path)
        try:
            files.write_new(self.path, self._me.pack())
        except FileExistsError:
            return False
        return True

    def holder(self) -> Holder:
        """Return who holds it; a holder without a host if that is not known."""
        with suppress(FileNotFoundError):
            return Holder.unpack(files.read_whole(self.path, _LONGEST))
        return Holder()

    def is_held(self) -> bool:
        """Return whether this run holds it. Raises `FileNotFoundError` if it is gone."""
        return files.read_whole(self.path, _LONGEST) == self._me.pack()

    def close(self) -> None:
        """Remove the lease. Not in a forked child, which does not hold it."""
        with suppress(OSError):
            if self._me.pid == os.getpid() and self.is_held():
                files.remove(self.path)


class _Flock:
    """A lock of the kernel, which ends with the process that holds it. Whoever takes it writes its text."""

    remedy = ""

    def __init__(self, path: Path, me: Holder, number: int) -> None:
        """``number``: of the open file."""
        self.path, self._me, self._number = path, me, number

    def holder(self) -> Holder:
        """Return who holds it; a holder without a host if that is not known."""
        text = bytearray(_LONGEST)
        return Holder.unpack(bytes(text[: files.read_at(self._number, memoryview(text), 0)]))

    def is_held(self) -> bool:
        """Return whether the open file is the one at its path. Raises `FileNotFoundError` if there is none."""
        return os.path.samestat(os.fstat(self._number), os.stat(self.path))

    def take(self) -> bool:
        """Take the lock if it is free. Return whether this run holds it now."""
        if not files.lock(self._number):
            return False
        longest = os.fstat(self._number).st_size  # of the text of an earlier holder
        files.write_at(self._number, self._me.pack().ljust(longest), 0)
        return True


def _system() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int:
    """Return the start of a process of this host, as proc(5) has it; 0 if it has ended, although it may not be waited
    for yet, or if there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # from field 3 on; the name of the process may have blanks
    has_ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # none of its threads is left
    return 0 if has_ended else int(fields[19])


_LARGEST = 1 << 20
_NOT_IN_PLACE = files.UNSUPPORTED | {errno.ESPIPE}


def check_visible(optimizer: ZeroOptimizer, directory: Path, problem: Exception | None) -> bool:
    """Return whether each rank needs files of its own, since no two can write into one. Collective.

    Raises `ValueError` on every rank unless each names and sees the same ``directory``. Every rank writes two bytes of
    a scratch page, the second one first, or a file of its own, and reads those of all. Rank 0 creates the folder if it
    is missing, and warns of what is weaker.

    ``problem``: an error that this rank found.
    """
    rank, world = optimizer.rank, optimizer.world_size
    scratch = directory / f".probe-{secrets.token_hex(8)}"
    reserves = True
    if rank == 0 and problem is None:
        try:
            files.make_folders(directory)
            reserves = files.create(scratch, 2 * world)
        except OSError as error:
            problem = error
    text = None if problem is None else str(problem)
    if isinstance(problem, OSError):
        text = f"{directory} cannot be written on host {socket.gethostname()}: {problem}"

    def compare() -> None:
        paths = [_part(shared, number) for number in range(world)] if in_parts else [shared]
        if b"".join(files.read_whole(path, _LARGEST) for path in paths) != b"".join(map(_bytes, range(world))):
            raise OSError("it does not see what other ranks have written there: a file system that is shared is needed")
        if rank == 0:
            lacks = {"fsync": not files.sync_folder(directory), "pwrite": in_parts}
            lacks["posix_fallocate"] = not (reserves or in_parts)  # no file is made with room if they are in parts
            for call in (call for call in lacks if lacks[call]):
                warn_caller(files.weaker(directory, call))

    try:
        mine = [text, scratch.name, str(directory), socket.gethostname()]
        told = [json.loads(data) for data in optimizer.exchange(json.dumps(mine).encode())]
        for number, (theirs, *_) in enumerate(told):
            if theirs is not None:
                raise ValueError(f"rank {number}: {theirs}")
        _, name, first, _ = told[0]
        for number, (_, _, theirs, host) in enumerate(told):
            if theirs != first:
                raise ValueError(
                    f"the folder is {theirs!r} on rank {number} (host {host}), but {first!r} on rank 0: every rank "
                    "must name the same one"
                )
        shared = directory / name
        in_parts = _on_any(optimizer, directory, lambda: not _write_in_place(shared, rank))
        if in_parts:
            _on_any(optimizer, directory, lambda: files.write_new(_part(shared, rank), _bytes(rank)))
        _on_any(optimizer, directory, compare)
        return in_parts
    finally:
        if rank == 0:
            with suppress(OSError):
                for path in directory.glob(f"{scratch.name}*"):
                    files.remove(path)


def _write_in_place(path: Path, rank: int) -> bool:
    """Write a rank's bytes, the second one first. Return False if the file system cannot."""
    try:
        with files.opened(path) as number:
            for place in (1, 0):
                files.write_at(number, _bytes(rank)[place:][:1], 2 * rank + place)
    except OSError as error:
        if error.errno not in _NOT_IN_PLACE:
            raise
        return False
    files.sync_file(path)
    return True


def _on_any(optimizer: ZeroOptimizer, directory: Path, action: Callable[[], bool | None]) -> bool:
    """Return whether ``action`` is true on some rank. Raises `ValueError` on every rank if one gets an `OSError`, or a
    warning that is an error."""
    problem, found = None, False
    try:
        found = bool(action())
    except (OSError, Warning) as error:
        problem = str(error)
        if isinstance(error, OSError) and error.errno is not None:
            problem = f"it does not see it, or cannot read or write there ({error.strerror})"
    mine = json.dumps([problem, socket.gethostname(), os.getpid(), found])
    told = [json.loads(data) for data in optimizer.exchange(mine.encode())]
    for rank, (theirs, host, pid, _) in enumerate(told):
        if theirs is not None:
            raise ValueError(f"{directory}: rank {rank} (host {host}, pid {pid}) cannot use this folder: {theirs}")
    return any(found for *_, found in told)


def _part(path: Path, rank: int) -> Path:
    """Return a rank's own scratch file."""
    return path.with_name(f"{path.name}.{rank}")


def _bytes(rank: int) -> bytes:
    """Return what a rank writes."""
    return bytes([1 + rank % 255] * 2)


_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.tmp-(step-\d{8,})-([0-9a-f]{16})")
_OURS = (
    re.compile(r"(model|optimizer|masters)(/\1-\d{5,}-of-\d{5,}\.safetensors|/\1\.safetensors\.index\.json)?"),
    re.compile(r"averages(/([^/]+)(/\2-\d{5,}-of-\d{5,}\.safetensors|/\2\.safetensors\.index\.json)?)?"),
    re.compile(r"ranks(/rank-\d{5,}\.safetensors)?"),
    re.compile(rf"state\.safetensors|{re.escape(NAME)}"),
    re.compile(rf"{NOTES}(/(nonce|copied|ready|failed|rank-\d{{5,}}\.(done|failed)|\.[a-z0-9.-]+\.part))?"),
    re.compile(r"parts(/rank-\d{5,})?"),
)
_MOVED = re.compile(r"(\.trash|abandoned)-step-(\d{8,})-([0-9a-f]{16})")
_SCRATCH = re.compile(r"\.saved-([0-9a-f]{16})-[0-9a-f]{64}|\.probe-[0-9a-f]{16}(\.\d+)?")


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
    moved: list[tuple[re.Match[str], Path]] = []
    under_way: set[str] = set()  # nonces of saves
    with suppress(FileNotFoundError):
        for entry in directory.iterdir():
            if entry.is_symlink() or not entry.is_dir():
                continue
            if (step := _STEP.fullmatch(entry.name)) and entry.name == step_name(int(step[1])):
                found[int(step[1])] = entry
            elif temporary := _TEMPORARY.fullmatch(entry.name):
                under_way.add(temporary[2])
            elif other := _MOVED.fullmatch(entry.name):
                moved.append((other, entry))
    by_old_name = {
        int(name[2]): entry
        for name, entry in sorted(moved, key=lambda each: each[1].name)  # what was set aside counts, before trash
        if (name[3] in under_way if name[1] == "abandoned" else is_complete(entry))
    }
    return dict(sorted({**by_old_name, **found}.items()))


def set_aside(directory: Path, step: int) -> list[Path]:
    """Return the folders of a step that saves have set aside."""
    return sorted(directory.glob(f"abandoned-{step_name(step)}-*"))


def complete_steps(directory: Path) -> list[int]:
    """Return the steps whose folders are complete, in ascending order."""
    return [step for step, folder in steps_in(directory).items() if is_complete(folder)]


class LockedDirectory:
    """A folder of checkpoints that this run alone writes to: until `close`, or until this object or the process is
    gone. Held by rank 0.

    Attributes:
        path: the folder.
        remark: what is weaker than a lock of the kernel; None if it is one.
    """

    def __init__(self, folder: Path, nonce: str) -> None:
        """Create the folder if it is missing, and lock it. Raises `ValueError` if another run holds the lock."""
        files.make_folders(folder)
        self.path, self._me = folder, Holder.me(nonce)
        self._unremoved: set[Path] = set()  # what this run has renamed, and could not remove yet
        self._open = ExitStack()  # what is open while the lock is held
        self._closing = weakref.finalize(self, self._open.close)  # also if nobody calls `close`
        self.remark = self._lock()
        self.check()
        if self.remark is not None:
            warn_caller(self.remark)
        # a forked child, a worker of a data loader say, must not hold the lock after us
        os.register_at_fork(after_in_child=self._closing)

    def _lock(self) -> str | None:
        """Take the lock. Return `remark`."""
        self._held: _Flock | _Lease
        remark: str | None = None
        lease = _Lease(self.path / LEASE, self._me)
        with ExitStack() as opening:
            # while it is open, no other folder gets its number
            self._folder = opening.enter_context(files.opened(self.path, files.FOLDER))
            try:
                number = opening.enter_context(files.opened(self.path / LOCK, files.LOCK))
                self._take(_Flock(self.path / LOCK, self._me, number))
            except OSError as error:
                if error.errno not in files.NO_LOCKS:
                    raise
                remark = files.weaker(self.path, "flock", error.strerror)
                self._take(lease)
                opening.callback(lease.close)
            else:
                if files.exists(lease.path) and not lease.holder().has_ended():  # of a run on a host without locks
                    raise ValueError(f"{lease.holder()} still trains into {self.path}{lease.remedy}")
            self._open.push(opening.pop_all())
        return remark

    def _take(self, lock: _Flock | _Lease) -> None:
        """Take the lock. Raises `ValueError` that names its holder, which may be ending just now."""
        end = time.monotonic() + _GONE
        while not lock.take():
            if time.monotonic() > end:
                text = f"{lock.holder()} still trains into {self.path}: stop it, or use another folder"
                raise ValueError(f"{text}{lock.remedy}")
            time.sleep(_PAUSE)
        self._held = lock

    def check(self) -> None:
        """Raise an error unless this run holds the lock.

        `RuntimeError`: it was removed, or replaced by another run. `FileNotFoundError`: the folder was removed. If it
        was made again, it is locked again.
        """
        at_its_path = False
        with suppress(OSError):  # ESTALE, EBADF, or there is none
            at_its_path = os.path.samestat(os.fstat(self._folder), os.stat(self.path))
        if not at_its_path:
            if not self.path.is_dir():
                raise FileNotFoundError(f"{self.path} was removed: make it again, and saves go on")
            self._open.close()
            self._lock()
        try:
            how = "" if self._held.is_held() else "belongs to another run"
        except FileNotFoundError:
            how = "is gone"
        if how:
            raise RuntimeError(f"{self._held.path} {how}: this run may not write here any more")

    def close(self) -> None:
        """Give up the lock."""
        with suppress(OSError, RuntimeError, ValueError):
            self.remove([])
        self._closing()

    def clean(self) -> list[str]:
        """Remove what earlier runs have left, and give steps that were being replaced or set aside their names back.

        Returns, as text, what was left instead, and why.
        """
        left: list[str] = []
        for entry in sorted(self.path.iterdir()):
            try:
                if temporary := _TEMPORARY.fullmatch(entry.name):
                    self._bring_back()
                    left += _remove_left(entry, is_ours=_has_nonce(entry, temporary[2]))
                elif entry.name.startswith(".trash-") and _MOVED.fullmatch(entry.name):
                    self._bring_back()
                    left += _remove_left(entry, is_ours=_manifest(entry) is not None)
                elif _scratch(entry):
                    files.remove(entry)
            except OSError as error:
                left.append(f"{entry} could not be removed ({error})")
        return left

    def _bring_back(self) -> None:
        """Give the steps their names back that a save was about to replace or set aside, which was not completed."""
        homes = {folder: self.path / step_name(step) for step, folder in steps_in(self.path).items()}
        moved = {folder: home for folder, home in homes.items() if folder != home}
        for folder, home in moved.items():
            self.check()
            files.rename(folder, home)
        if moved:
            files.sync_folder(self.path)  # before the folder of that save is removed

    def above(self, step: int, nonce: str, *, but: int | None) -> list[tuple[Path, Path]]:
        """Return the checkpoints of higher steps ``but`` one, with their names once the save ``nonce`` is complete."""
        self._bring_back()
        return [
            (folder, self.path / f"abandoned-{folder.name}-{nonce}")
            for number, folder in steps_in(self.path).items()
            if number > step and number != but and is_ours(folder)
        ]

    def remove(self, steps: Iterable[int]) -> list[str]:
        """Remove these steps, and what could not be removed before. Return, as text, what was left instead. A crash
        leaves a trash folder for `clean`."""
        left: list[str] = []
        for trash in sorted(self._unremoved):
            left += self.remove_trash(trash)
        there = steps_in(self.path)
        for step in steps:
            if step not in there or there[step] in self._unremoved:
                continue  # its trash folder was whole, and is removed by now, or cannot be removed
            strange = foreign(there[step])
            if strange is not None:
                left.append(strange)
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
        for entry in self.path.glob(".saved-*"):
            found = _scratch(entry)
            if found and found[1] != but:
                files.remove(entry)


def check_free(target: Path, *, overwrite: bool) -> None:
    """Raise `FileExistsError` if something exists that may not be replaced: only a checkpoint may."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists: overwrite=True replaces it")
    strange = foreign(target)
    if strange is not None:
        raise FileExistsError(f"{strange}: remove it yourself, or save elsewhere")


def foreign(folder: Path) -> str | None:
    """Return, as text, why a checkpoint's folder is left: an entry of it that is no part of it; None if there is none.

    The manifest has the names of its files. Without one, names of this library and those in a note are parts.
    """
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder} is left, because it is no folder"
    manifest, copied = _manifest(folder), set[str]()
    with suppress(OSError):
        copied = copied_in(files.read_whole(folder / NOTES / COPIED, LONGEST))
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent) / name
            inside = path.relative_to(folder).as_posix()
            known = inside in copied or any(pattern.fullmatch(inside) for pattern in _OURS)
            if manifest is not None and name in names and not inside.startswith(f"{NOTES}/"):
                known = inside == NAME or inside in manifest.files
            if path.is_symlink() or not known:
                return f"{folder} is left, because it has {inside}, which is no part of a checkpoint"
    return None


def is_ours(folder: Path) -> bool:
    """Return whether a folder is known to be a checkpoint, perhaps a broken one."""
    return is_complete(folder) or _manifest(folder) is not None or foreign(folder) is None


def remove_checkpoint(folder: Path) -> list[str]:
    """Remove the folder of a checkpoint or of a save. Returns, as text, what was left, and why.

    If it has anything foreign, it is left.
    """
    strange = foreign(folder)
    if strange is not None:
        return [strange]
    remove_all(folder)
    return []


def remove_all(folder: Path, *, but_notes: bool = False) -> None:
    """Remove a folder of this library's, as far as possible, and raise the first error then.

    What shows a later `clean` that it is one goes last, and stays if anything does. ``but_notes``: leave the notes.
    """
    notes = folder / NOTES
    found = [
        Path(parent, name) for parent, within, names in os.walk(folder, topdown=False) for name in (*names, *within)
    ]
    marks = [notes / COPIED, notes / "nonce", notes, folder]
    failed: list[OSError] = []

    def attempt(path: Path) -> None:
        try:
            (files.remove_folder if path.is_dir() else files.remove)(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            failed.append(error)

    for path in found:
        if path not in (*marks, folder / NAME) and not (but_notes and path.parent == notes):
            attempt(path)
    for mark in (folder / NAME, *(() if but_notes else marks)):
        if not failed:
            attempt(mark)
    if failed:
        raise failed[0]


def _manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, whatever else is missing; None if there is no whole one."""
    with suppress(OSError, FormatError):
        return read_manifest(folder)
    return None


def _has_nonce(folder: Path, nonce: str) -> bool:
    """Return whether a folder of a save is one of this library's: it has the note, or the manifest, of that nonce."""
    with suppress(OSError):
        return files.read_whole(folder / NOTES / "nonce", 64) == nonce.encode()
    manifest = _manifest(folder)
    return manifest is not None and manifest.written_by.get("nonce") == nonce


def _scratch(path: Path) -> re.Match[str] | None:
    """Return the name of a file of this library's that a run leaves beside checkpoints; None if it is none."""
    found = _SCRATCH.fullmatch(path.name)
    return found if found and stat.S_ISREG(os.lstat(path).st_mode) else None


def _remove_left(folder: Path, *, is_ours: bool) -> list[str]:
    """Remove what a run has left of a checkpoint or of a save. Returns, as text, what was left, and why.

    Unless it ``is_ours``, it is removed only if it is empty: of a run that has ended before it wrote its nonce, or
    after it removed all else.
    """
    if is_ours:
        return remove_checkpoint(folder)
    if not folder.is_symlink():
        for call, path in (
            (files.remove, folder / NOTES / ".nonce.part"),
            (files.remove_folder, folder / NOTES),
            (files.remove_folder, folder),
        ):
            with suppress(OSError):
                call(path)
    if os.path.lexists(folder):
        return [f"{folder} is left, because nothing in it shows that it is a checkpoint or a save"]
    return []
