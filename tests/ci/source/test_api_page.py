"""The API page has every public name, with a docstring."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = re.findall(r"^    ((?:[\w.]+ )+)", (ROOT / ".ci/api_page").read_text(), re.MULTILINE)[0].split()
doc = pytest.importorskip("pdoc.doc", reason="needs the extra docs")


def undocumented(name: str) -> Iterator[str]:
    for member in doc.Module(importlib.import_module(name)).members.values():
        if not member.docstring:
            yield member.fullname
        for inner in member.members.values() if isinstance(member, doc.Class) else ():
            ours = inner.taken_from[0].partition(".")[0] in ("zero", "collectives")
            is_call = isinstance(inner, doc.Function) and not inner.name.startswith("_")
            if ours and is_call and not inner.docstring:
                yield inner.fullname


def test_every_public_name_is_on_the_page_with_a_docstring() -> None:
    for module in MODULES:
        assert list(doc.Module(importlib.import_module(module)).members) == list(
            importlib.import_module(module).__all__
        )
        assert list(undocumented(module)) == []
