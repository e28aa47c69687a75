"""New names for the tensors of a file: what a caller says about old ones.

Knows: names. Does not know: files, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from .names import known_as

Rename = Mapping[str, str | None] | Callable[[str], str | None]


def renamed(rename: Rename | None, saved: Iterable[str], known: Container[str], where: str) -> dict[str, str]:
    """Return saved name -> new name, without what is left out.

    Args:
        rename: saved name -> new name, or None to leave it out; a mapping has only the names that change.
        saved: all saved names.
        known: the names of the model, as far as they are known.
        where: what has the saved names, for errors: "the checkpoint".

    Raises:
        ValueError: a mapping has a name that was not saved, or two saved names become one.
        TypeError: a new name is no text.
    """
    there = dict.fromkeys(saved)
    if isinstance(rename, Mapping):
        for name in rename:
            if name not in there:
                raise ValueError(f"rename: {where} has no {name!r}")
    found: dict[str, str] = {}
    before: dict[str, str] = {}  # the other way round
    for name in there:
        new = _new(rename, name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename: the new name of {name!r} is {new!r}, neither a text nor None")
        plain = known_as(new, known)
        new = new if plain in there and plain != name else plain  # a name that is taken keeps its own
        if new in before:
            raise ValueError(f"rename: {before[new]!r} and {name!r} of {where} would both become {new!r}")
        found[name], before[new] = new, name
    return found


def _new(rename: Rename | None, name: str) -> str | None:
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    return name if rename is None else rename(name)
