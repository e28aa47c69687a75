"""In what a checkpoint may differ from the model: names, tensors that only one of the two has, and rows.

Knows: names, shapes, what the caller allows. Does not know: files, optimizers, memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from ...core.names import Rename, known_as, new_name, renamed

Shape = tuple[int, ...]
Resize = Callable[[str, Shape, Shape], bool]


@dataclass(frozen=True)
class Differences:
    """What a caller allows.

    Attributes:
        strict: whether each tensor of the model must be in the checkpoint, and the other way round.
        rename: saved name -> the model's name, or None to leave it out; a mapping has only the names that change.
        resize: called with the model's name, the saved shape and the model's, if these differ; True: read the leading
            rows that both have.
    """

    strict: bool = True
    rename: Rename | None = None
    resize: Resize | None = None

    def names(self, saved: Iterable[str], known: Set[str], ties: Mapping[str, str]) -> dict[str, str]:
        """Return saved name -> the model's name, without what is left out.

        ``known``: the names of the model; ``ties``: further saved names, of which a mapping may speak.

        Raises:
            ValueError: a mapping has a name that was not saved, two saved names become one, or a function raises.
            TypeError: a new name is no text, or an argument is of another kind.
        """
        if self.resize is not None and not callable(self.resize):
            raise TypeError(f"resize must be a function of a name and two shapes, not {self.resize!r}")
        return renamed(self.rename, saved, known, "the checkpoint", ties)

    def further_name(self, saved: str, known: Set[str]) -> str | None:
        """Return the model's name for a further name of a saved tensor; None if it is left out. Raises like `names`."""
        new = new_name(self.rename, saved)
        return None if new is None else known_as(new, known)

    def has_rows(self, name: str, saved: Shape, shape: Shape) -> bool:
        """Return whether the leading rows are read of a tensor with another shape.

        Raises:
            ValueError: the caller wants them, but more than the number of rows differs; or the function raises.
        """
        if self.resize is None:
            return False
        try:
            wanted = bool(self.resize(name, saved, shape))
        except Exception as error:
            raise ValueError(
                f"resize: the function failed for {name!r}, of shape {saved} in the checkpoint and {shape} in the "
                f"model ({type(error).__name__}: {error})"
            ) from error
        if not wanted:
            return False
        if not saved or not shape or saved[1:] != shape[1:]:
            raise ValueError(
                f"resize: {name!r} has shape {saved} in the checkpoint and {shape} in the model, which differ in more "
                "than their first dimension: return False for it"
            )
        return True
