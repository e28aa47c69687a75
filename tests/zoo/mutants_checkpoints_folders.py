"""Mutants of the folder of checkpoints: a run that goes back to an older step, and file systems that lack something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .mutant import Mutant, Wrap

COMMIT, DIRECTORY = (f"checkpoint/test_{name}.py" for name in ("commit", "directory"))
WENT_BACK = f"{COMMIT}::test_after_any_crash_of_a_run_that_went_back_its_step_or_the_old_newest_is_the_newest[1]"
LOCKED = "zero.checkpoint.directory.LockedDirectory"


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


MUTANTS = (
    Mutant(
        "a-branch-that-was-left-is-the-newest",
        ("P60",),
        "After a restore of step 2 the run saves step 3; the next one takes step 8, which the run has left.",
        (Wrap(f"{LOCKED}.above", none_is_above),),
        (f"{DIRECTORY}::test_a_save_below_the_newest_step_is_the_newest_and_what_was_above_is_set_aside_by_name",),
    ),
    Mutant(
        "a-branch-is-left-before-the-save-is-complete",
        ("P60", "P36"),
        "A crash of a save below the newest step leaves neither the old newest step nor the new one as the newest.",
        (Wrap("zero.checkpoint.directory.steps_in", under_their_own_names_alone),),
        (WENT_BACK,),
    ),
    Mutant(
        "what-was-not-set-aside-yet-is-not-brought-back",
        ("P60", "P36"),
        "The next run removes what a crash has left of a save, and with it the old newest step is gone.",
        (Wrap(f"{LOCKED}._bring_back", brings_nothing_back),),
        (WENT_BACK,),
    ),
)
