"""The parts of a model that is spread over several optimizers: the folder of each, and what all of them have.

    <directory>/tp-0/step-00000100/        the part of the ranks whose place in the mesh is 0 along tp
    <directory>/tp-1/step-00000100/
    <directory>/tp-1/step-00000200/        not complete in tp-0: it is no checkpoint of the model

A part is named by the dimensions of the larger mesh that the optimizer's own mesh leaves out. Its ranks save and load
it alone. Before a load the ranks with one place in each part compare what their parts have. A step that was saved again
after a rollback, but not in all parts, has another mark in some: it is no checkpoint of the model either.

Knows: names of folders, groups of the larger mesh. Does not know: how a checkpoint is written or read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from collectives import Kind, Tag, Transport

from ...config import transport_of
from ...core.statetree import FormatError
from ...optimizer import ZeroOptimizer
from ..sharded_optimizer import ShardedOptimizer
from .directory import is_complete, read_manifest

_TAG = Tag(Kind.EXCHANGE, "comparing the parts of a model")


def marks_of(folders: Mapping[int, Path]) -> dict[int, str]:
    """Return the marks of those checkpoints of a part that are complete, by their steps."""
    found = {step: "" for step, path in folders.items() if is_complete(path)}
    for step in found:
        with suppress(OSError, FormatError):  # another version's
            found[step] = str(read_manifest(folders[step]).written_by.get("mark", ""))
    return found


class ModelParts:
    """The part of one optimizer, and the other parts of its model. If there are none, nothing is sent."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        place = ShardedOptimizer(optimizer).place
        self._part = () if place is None else place.part
        self._groups: tuple[Any, ...] = () if place is None else place.groups
        self._transports: list[Transport] | None = None
        self._told = True  # the other parts know how it went here
        self.mark = ""  # for the next save: what all parts had before

    @property
    def name(self) -> str:
        """The name of this part; empty if it is the whole model."""
        return "-".join(f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}-{place}" for name, place, _ in self._part)

    @property
    def facts(self) -> dict[str, list[int]]:
        """For the manifest: this part's place and the number of places, by dimension."""
        return {name: [place, size] for name, place, size in self._part}

    def folder(self, directory: Path) -> Path:
        """Return the folder of this part."""
        return directory / self.name if self._part else directory

    def check(self, saved: Any, path: Path) -> None:
        """Raise `ValueError` if a checkpoint with the facts ``saved`` is that of another part. Local."""
        if self._part and saved is not None and saved != self.facts:
            texts = [
                ", ".join(f"{name} {place} of {size}" for name, (place, size) in of.items())
                for of in (saved, self.facts)
            ]
            raise ValueError(
                f"{path} is the part {texts[0]} of a model, and this rank has {texts[1]}: restore it with the "
                "model-parallel sizes and places with which it was saved; the data-parallel size is free"
            )

    # -- what the parts compare ---------------------------------------------------------------------------------------

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Return a context in which an error before `finished` reaches the ranks of the other parts."""
        self._told = not self._part
        try:
            yield
        except Exception as error:
            if not self._told:
                self._told = True
                self._exchange("problem", str(error))
            raise

    def finished(self) -> None:
        """Note that nothing more is compared. Local."""
        self._told = True

    def common(self, steps: Mapping[int, str], *, may_differ: bool = False) -> list[int]:
        """Return the steps that every part has from one save, newest first. Collective.

        ``steps``: those of this part, with their marks.

        Unless they ``may_differ``, raises `ValueError` on every rank if some part has steps, but no step is in all.
        """
        if not self._part:
            return list(steps)
        found = self._exchange("steps", list(steps.items()))
        self.mark = hashlib.sha256(str(sorted(found.items())).encode()).hexdigest()
        every = [{(step, mark) for step, mark in of} for of in found.values()]
        common = sorted((step for step, _ in set.intersection(*every)), reverse=True)
        if not (common or may_differ) and any(found.values()):
            texts = [
                f"{name} has {', '.join(str(step) for step, _ in sorted(of)) or 'none'}"
                for name, of in sorted(found.items())
            ]
            raise ValueError(
                f"no step is complete in every part of the model ({'; '.join(texts)}): all ranks must see one folder, "
                "and the model-parallel sizes must be those of the save"
            )
        return common

    def broken(self, mine: str | None) -> str | None:
        """Return, as text, why the checkpoint is broken in some part; None if it is whole in all. Collective."""
        if not self._part:
            return mine
        found = self._exchange("broken", mine)
        return mine or next((f"{name}: {text}" for name, text in sorted(found.items()) if text is not None), None)

    def _exchange(self, kind: str, mine: Any) -> dict[str, Any]:
        """Return what all parts tell of one ``kind``, by their names: along one dimension after the other.

        A part that has an error tells it instead, as a "problem": then all other ones raise it.
        """
        if self._transports is None:
            self._transports = [transport_of(group).fork() for group in self._groups]
        found = {kind: {self.name: mine}}
        for transport in self._transports:
            told = [json.loads(data) for data in transport.exchange(json.dumps(found).encode(), _TAG)]
            found = {key: {} for each in told for key in each}
            for each in told:
                for key, by_name in each.items():
                    found[key] |= by_name
        others = found.get("problem", {})
        if kind != "problem" and others:
            self._told = True
            raise RuntimeError("; ".join(f"part {name}: {text}" for name, text in sorted(others.items())))
        return found[kind]
