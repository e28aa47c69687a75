"""Mutants of the folder of checkpoints: a run that goes back to an older step, and file systems that lack something."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .mutant import Mutant, Wrap

COMMIT, DIRECTORY, SYSTEMS = (f"checkpoint/test_{name}.py" for name in ("commit", "directory", "file_systems"))
WEAKER = f"{SYSTEMS}::test_what_can_be_left_out_or_done_otherwise_is_with_one_warning_and_the_same_bytes"
WENT_BACK = f"{COMMIT}::test_after_any_crash_of_a_run_that_went_back_its_step_or_the_old_newest_is_the_newest[1]"
LOCKED = "zero.checkpoint.folder.directory.LockedDirectory"


def none_is_above(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let a save find no higher step."""
    return lambda this, step, nonce: []


def under_their_own_names_alone(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let a step that a save was about to set aside be none, although that save is not complete."""

    def wrong(directory: Path) -> dict[int, Path]:
        return {step: path for step, path in real(directory).items() if not path.name.startswith("abandoned-")}

    return wrong


def brings_nothing_back(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let the next run remove the folder of a save, and leave what that save was about to set aside."""
    return lambda this, nonce: None


def is_never_held(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let a run take a lease that another one holds."""

    def wrong(this: Any) -> bool:
        return real(this) or True

    return wrong


def every_other_process_has_ended(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let a process of another host, or of another boot, be one that has ended."""

    def wrong(this: Any) -> bool:
        return bool(this.host) and this.pid != os.getpid()

    return wrong


def says_it_again(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let every save say what the file system lacks."""

    def wrong(this: Any, saving: Any) -> None:
        this._weaker.clear()
        real(this, saving)

    return wrong


def puts_together_without_looking(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let rank 0 put files together from whatever is in the parts of the other ranks."""

    def wrong(folder: Path, paths: Any, fragments: Any) -> None:
        def as_found(fragment: Any) -> Any:
            data = (folder / "parts" / f"rank-{fragment.rank:05d}").read_bytes()
            found = data[fragment.place :][: fragment.length].ljust(fragment.length, b"\0")
            return replace(fragment, crc32=zlib.crc32(found))

        real(folder, paths, {path: list(map(as_found, found)) for path, found in fragments.items()})

    return wrong


def is_an_error_of_the_run(real: Callable[..., Any]) -> Callable[..., Any]:
    """Let a folder that was removed be as a lock that was lost, which no later save can mend."""

    def wrong(this: Any) -> None:
        if not this._folder.is_at_its_path():
            raise RuntimeError(f"{this._held.path} is gone: this run may not write here any more")
        real(this)

    return wrong


LEASES, TOGETHER = "zero.checkpoint.folder.lock._Lease.take", "zero.checkpoint.write.part_writer.put_together"

MUTANTS = (
    Mutant(
        "a-branch-that-was-left-is-the-newest",
        ("P55",),
        "After a restore of step 2 the run saves step 3; the next one takes step 8, which the run has left.",
        (Wrap(f"{LOCKED}.above", none_is_above),),
        (f"{DIRECTORY}::test_a_save_below_the_newest_step_is_the_newest_and_what_was_above_is_set_aside_by_name",),
    ),
    Mutant(
        "a-branch-is-left-before-the-save-is-complete",
        ("P55", "P36"),
        "A crash of a save below the newest step leaves neither the old newest step nor the new one as the newest.",
        (Wrap("zero.checkpoint.folder.directory.steps_in", under_their_own_names_alone),),
        (WENT_BACK,),
    ),
    Mutant(
        "what-was-not-set-aside-yet-is-not-brought-back",
        ("P55", "P36"),
        "The next run removes what a crash has left of a save, and with it the old newest step is gone.",
        (Wrap(f"{LOCKED}._bring_back", brings_nothing_back),),
        (WENT_BACK,),
    ),
    Mutant(
        "without-locks-two-runs-write",
        ("L20", "P56"),
        "On a file system without locks a second run is not kept out.",
        (Wrap(LEASES, is_never_held),),
        (f"{SYSTEMS}::test_a_second_run_is_refused_without_locks_too_and_told_what_to_remove",),
    ),
    Mutant(
        "a-run-on-another-host-is-taken-for-dead",
        ("L20", "P56"),
        "On a file system without locks a run on another host, or before a reboot of one with this name, is overtaken.",
        (Wrap("zero.checkpoint.folder.holder.Holder.has_ended", every_other_process_has_ended),),
        (
            f"{SYSTEMS}::test_a_lease_of_which_nothing_shows_that_its_process_has_ended_is_an_error_that_names_it"
            "[False-changes0]",
        ),
    ),
    Mutant(
        "every-save-says-what-the-file-system-lacks",
        ("P56",),
        "What a file system lacks is a warning of every save, which hides the others.",
        (Wrap("zero.checkpoint.failures.Failures.note", says_it_again),),
        (f"{WEAKER}[no posix_fallocate: ENOTSUP]",),
    ),
    Mutant(
        "parts-are-put-together-unseen",
        ("P56", "P38"),
        "What rank 0 puts together from the parts of the ranks is not compared with what they have written.",
        (Wrap(TOGETHER, puts_together_without_looking),),
        (f"{SYSTEMS}::test_what_a_rank_has_written_is_compared_when_the_files_are_put_together",),
    ),
    Mutant(
        "a-folder-that-was-removed-ends-the-run",
        ("P40",),
        "The folder is removed under the run: every later save is an error, also when the folder is there again.",
        (Wrap("zero.checkpoint.folder.lock.FolderLock.check", is_an_error_of_the_run),),
        (f"{DIRECTORY}::test_a_folder_that_is_removed_under_the_run_fails_saves_until_the_user_makes_it_again",),
    ),
)
