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
    """Return the names on the page of a module that have no docstring."""
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


def test_the_sidebar_has_each_call_that_the_page_describes() -> None:
    render = importlib.import_module("pdoc.render")
    render.configure(docformat="google", show_source=False, template_directory=ROOT / ".ci" / "api")
    page = render.html_module(doc.Module(importlib.import_module("zero")), all_modules={})
    sidebar, _, body = page.partition("</nav>")
    described = set(re.findall(r'id="(ZeroOptimizer[.]\w+)"', body))
    assert {"ZeroOptimizer.step", "ZeroOptimizer.full_state_dict", "ZeroOptimizer.clip_grad_norm_"} <= described
    assert set(re.findall(r'href="#(ZeroOptimizer[.]\w+)"', sidebar)) == described
