"""What becomes of a save that has failed after `save` returned: training goes on, and every rank warns once.

Knows: which failure the caller knows of. Does not know: how a save fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .options import warn_caller
from .write.save_folder import UnseenError
from .write.save_thread import LATE, Saving
from .write.saver import REPORT


class Failures:
    """The failed saves of one manager on one rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told: Saving | None = None
        self._weaker: set[str] = set()  # what was said of the file system

    def hear(self, saving: Saving, reports: Sequence[Mapping[str, str]]) -> None:
        """Warn if some rank has reported that this save has failed. All ranks hear the same, in the same step.

        A rank that knows it to be complete does not: rank 0 has decided before the other one was interrupted, say.
        """
        name = REPORT.format(nonce=saving.nonce)
        found = [report[name] for report in reports if name in report]
        if found and not (saving.done() and saving.error is None):
            why = min(found, key=lambda text: text.startswith(LATE)).removeprefix(LATE)
            saving.learn(why)
            self._warn(saving, self._failed(saving, why))

    def note(self, saving: Saving) -> None:
        """Take note of how a save has ended, and warn if it has failed. It must be over."""
        remarks, saving.remarks = saving.remarks, []
        weaker = [text for text in saving.weaker if text not in self._weaker]
        self._weaker.update(weaker)
        for text in (*weaker, *remarks):
            warn_caller(text)
        if saving.error is not None:
            why = str(saving.error)
            self._warn(saving, why if isinstance(saving.error, UnseenError) else self._failed(saving, why))

    def _failed(self, saving: Saving, why: str) -> str:
        there = f"; older checkpoints in {self._directory} are as they were" if self._directory.is_dir() else ""
        what = f"the save of step {saving.step} has failed, and training goes on"
        return f"{what}: {why}{there}; the next save tries again"

    def _warn(self, saving: Saving, text: str) -> None:
        if saving is not self._told and not saving.was_raised:
            self._told = saving
            warn_caller(text)
