"""The API page has every public name, with a docstring; the command of CONTRIBUTING.md is the one that CI runs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMAND = re.compile(r"python (?P<options>.* -m pdoc .*) -o \S+ (?P<modules>zero .*?)\"?$", re.MULTILINE)
doc = pytest.importorskip("pdoc.doc", reason="needs the extra docs")


def page_command(path: str) -> tuple[str, str]:
    """Return the options and the modules of the command that makes the page, as a file of the repository has it."""
    found = COMMAND.search((ROOT / path).read_text())
    assert found is not None, path
    return found["options"], found["modules"]


def modules() -> list[str]:
    return [name for name in page_command("CONTRIBUTING.md")[1].split() if "!" not in name]


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


def test_ci_makes_the_page_by_the_command_of_the_page_on_contributing() -> None:
    assert page_command("CONTRIBUTING.md") == page_command(".ci/run")


def test_every_public_name_and_call_has_a_docstring() -> None:
    assert [name for module in modules() for name in undocumented(module)] == []


def test_the_sidebar_has_each_call_that_the_page_describes() -> None:
    render = importlib.import_module("pdoc.render")
    render.configure(docformat="google", show_source=False, template_directory=ROOT / ".ci" / "api")
    page = render.html_module(doc.Module(importlib.import_module("zero")), all_modules={})
    sidebar, _, body = page.partition("</nav>")
    described = set(re.findall(r'id="(ZeroOptimizer[.]\w+)"', body))
    assert {"ZeroOptimizer.step", "ZeroOptimizer.full_state_dict", "ZeroOptimizer.clip_grad_norm_"} <= described
    assert set(re.findall(r'href="#(ZeroOptimizer[.]\w+)"', sidebar)) == described


def test_every_public_name_is_on_the_page() -> None:
    for module in modules():
        page = doc.Module(importlib.import_module(module))
        assert list(page.members) == list(importlib.import_module(module).__all__)
