"""Promises of the bug zoo: its patches fit, its entries are complete, and its judge takes no crash for a kill."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from collectives import PeerError

from .pool import ProgramError
from .zoo import table
from .zoo.__main__ import drawn, main
from .zoo.catalogue import MUTANTS
from .zoo.entries import ENTRIES, REPOSITORIES, link
from .zoo.judge import How, judge
from .zoo.mutant import ROOT, Edit, Mutant, PatchError, Wrap, patched, tree
from .zoo.runner import Outcome

SUBJECTS = [
    *(f"S{number}" for number in range(1, 98)),
    *(f"R{number}" for number in range(1, 19)),
    *("P24", "P27", *(f"P{number}" for number in range(31, 57) if number != 35)),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.full
def test_every_patch_fits_exactly_once_and_changes_code(mutant: Mutant) -> None:
    changed = patched(mutant)
    assert changed
    for file, text in changed.items():
        assert file.startswith(("zero/", "collectives/"))
        assert tree(text, file) != tree((ROOT / file).read_text(), file)


def test_no_two_mutants_are_the_same() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 50
    sources = {tuple(sorted((f, tree(text, f)) for f, text in patched(m).items())) for m in MUTANTS}
    assert len(sources) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.full
def test_the_tests_that_are_named_for_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        functions = ast.parse((ROOT / "tests" / file).read_text()).body
        assert name.partition("[")[0] in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("zero.step.clip", "no such text", ""), r"occurs 0 times in zero\.step\.clip, not once"),
        (Edit("zero.step.clip", "raise ", "assert "), r"occurs 4 times in zero\.step\.clip, not once"),
        (
            Edit("zero.step.clip.clip_factor", "import math", ""),
            r"occurs 0 times in zero\.step\.clip\.clip_factor, not once",
        ),
        (Edit("zeros.clip", "import math\n", ""), r"there is no module zeros\.clip"),
        (
            Edit("zero.clips", "import math\n", ""),
            r"there is no zero\.clips, since zero/__init__\.py does not define clips",
        ),
        (
            Edit("zero.step.clip.Clip.a", "", ""),
            r"there is no zero\.step\.clip\.Clip\.a, since zero/step/clip\.py does not define Clip\.a",
        ),
        (Edit("zero.step.clip", "import math\n", "import math  # twice\n"), "changes no code"),
        (Edit("zero.step.clip", "import math\n", "import math math\n"), r"zero/step/clip.py, line \d+: invalid syntax"),
    ],
)
def test_a_patch_that_does_not_fit_is_an_error(edit: Edit, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        patched(Mutant("a mutant", (), "", (edit,), ()))


PLACES = """\
class C:
    a = 1
    @property
    def p(self):
        a = 1
        def inner():
            a = 1
    @p.setter
    def p(self, value):
        a = 2
if C:
    @decorated(a == 1)
    def f():
        a = 1
else:
    async def g():
        a = 1
"""


def write_places(root: Path) -> None:
    """Write a package with a module and a sub-package with a module, all with the same text."""
    for file in (
        "zero/__init__.py",
        "zero/parameters/gathered/saved_tensor_index.py",
        "zero/core/__init__.py",
        "zero/core/places.py",
    ):
        (root / file).parent.mkdir(exist_ok=True, parents=True)
        (root / file).write_text(PLACES)


@pytest.mark.parametrize(
    ("place", "old", "line"),
    [
        ("C.p", "a = 2", 10),
        ("C.p.inner", "a = 1", 7),
        ("C.p.inner", "        def inner():\n            a = 1", 7),
        ("f", "    @decorated(a == 1)\n    def f():\n        a = 1\n", 14),
        ("g", "a = 1", 17),
    ],
)
@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("zero", "zero/__init__.py"),
        ("zero.parameters.gathered.saved_tensor_index", "zero/parameters/gathered/saved_tensor_index.py"),
        ("zero.core", "zero/core/__init__.py"),
        ("zero.core.places", "zero/core/places.py"),
    ],
)
def test_a_patch_changes_the_named_definition_alone(
    module: str, file: str, place: str, old: str, line: int, tmp_path: Path
) -> None:
    write_places(tmp_path)
    edit = Edit(f"{module}.{place}", old, old.replace("a = ", "b = "))
    ((changed, text),) = patched(Mutant("a mutant", (), "", (edit,), ()), tmp_path).items()
    assert changed == file
    pairs = enumerate(zip(PLACES.splitlines(), text.splitlines(), strict=True), 1)
    assert [number for number, (before, after) in pairs if before != after] == [line]


@pytest.mark.parametrize(("place", "times"), [("", 5), (".C", 3), (".C.p", 2)])
def test_old_text_is_counted_in_the_named_definition_alone(place: str, times: int, tmp_path: Path) -> None:
    write_places(tmp_path)
    edit = Edit(f"zero.parameters.gathered.saved_tensor_index{place}", "a = 1", "b = 1")
    where = rf"zero\.parameters\.gathered\.saved_tensor_index{place}"
    with pytest.raises(PatchError, match=rf"occurs {times} times in {where}, not once"):
        patched(Mutant("a mutant", (), "", (edit,), ()), tmp_path)


def doubled(real: Callable[[], int]) -> Callable[[], int]:
    return lambda: 2 * real()


def test_a_wrapper_replaces_what_other_modules_import(tmp_path: Path) -> None:
    text = "def one() -> int:\n    return 1\n\n\nclass C:\n    @staticmethod\n    def two() -> int:\n        return 2\n"
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "numbers.py").write_text(text)
    edits = (Wrap("zero.numbers.one", doubled), Wrap("zero.numbers.C.two", doubled))
    with pytest.raises(PatchError, match=r"zero/numbers\.py does not define three"):
        patched(Mutant("a mutant", (), "", (Wrap("zero.numbers.three", doubled),), ()), tmp_path)
    ((file, changed),) = patched(Mutant("a mutant", (), "", edits, ()), tmp_path).items()
    assert (file, changed[: len(text)]) == ("zero/numbers.py", text)
    names: dict[str, Any] = {}
    exec(compile(changed, file, "exec"), names)
    assert (names["one"](), names["C"].two()) == (2, 4)


def test_every_entry_is_covered_or_waits_or_says_why_not_exactly_once() -> None:
    covered = {name for mutant in MUTANTS for name in mutant.entries}
    assert covered <= set(ENTRIES)
    assert [name for name in ENTRIES if not name.startswith("L")] == SUBJECTS
    for name, entry in ENTRIES.items():
        assert [name in covered, bool(entry.waits), bool(entry.impossible)].count(True) == 1, name


def test_every_source_is_a_link() -> None:
    assert link("DS#7718") == "[DeepSpeed 7718](https://github.com/deepspeedai/DeepSpeed/issues/7718)"
    sources = {source for entry in ENTRIES.values() for source in entry.sources}
    assert {source.replace("!", "#").split("#")[0] for source in sources} == set(REPOSITORIES)
    assert all(link(source).count("https://github.com/") == 1 for source in sources)


def test_the_readme_s_tables_are_about_these_mutants_and_entries() -> None:
    text = table.README.read_text()
    _, _, *rows = table.between(text, table.MUTANTS_BEGIN, table.MUTANTS_END)
    assert len(rows) == len(MUTANTS)
    for row, mutant in zip(rows, MUTANTS, strict=True):
        assert row.startswith(f"| {' '.join(mutant.entries)} | `{mutant.name}` | {mutant.wrong} | `")
        assert any(f"| `{test.replace('|', chr(92) + '|')}" in row for test in mutant.tests), mutant.name
    assert table.between(text, table.ENTRIES_BEGIN, table.ENTRIES_END) == table.entry_rows()


def test_a_run_of_some_mutants_is_compared_with_their_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, *rows = table.between(table.README.read_text(), table.MUTANTS_BEGIN, table.MUTANTS_END)
    cells = [row.strip("|").replace("\\|", "\0").split("|") for row in rows]
    caught = {row[1].strip(" `"): row[3].strip(" `").replace("\0", "|") for row in cells}
    tiers = {caught[row[1].strip(" `")]: row[4].strip() for row in cells}
    monkeypatch.setattr(table, "of_every_test", lambda: tiers)
    parts = [drawn(MUTANTS, 4, text) for text in "abcdefgh"]
    assert {mutant.name for part in parts for mutant in part} == set(caught)
    outcomes = [Outcome(mutant, caught[mutant.name]) for mutant in parts[0]]
    assert len(MUTANTS) / 4 - 1 <= len(outcomes) <= len(MUTANTS) / 4 + 1
    assert table.difference(outcomes) == ""
    other = next(test for test in tiers if test != outcomes[3].test)
    outcomes[3] = replace(outcomes[3], test=other)
    assert f"+| {' '.join(outcomes[3].mutant.entries)} | `{outcomes[3].mutant.name}`" in table.difference(outcomes)
    gone = outcomes[5].mutant.name
    monkeypatch.setattr(table, "MUTANTS", [mutant for mutant in MUTANTS if mutant.name != gone])
    assert f"`{gone}`" in table.difference(outcomes[:3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--one-in=0"], "--one-in is 0: it must be from 1 to "),
        (["--one-in=100000"], "--one-in is 100000: it must be from 1 to "),
        (["--one-in=4", MUTANTS[0].name], "names and --one-in exclude each other"),
        (["--draw=a"], "say --one-in too"),
        (["--one-in=4", "--write"], "--write needs a run of all mutants"),
        (["--write", MUTANTS[0].name], "--write needs a run of all mutants"),
    ],
)
def test_options_that_contradict_each_other_are_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


# -- the judge --------------------------------------------------------------------------------------------------------

LIBRARY = """
import torch

def documented(kind=ValueError):
    raise kind(
        "this cannot be"
    )

def shapes():
    return torch.ones(2) + torch.ones(3)

def asserted():
    assert not torch

def attribute():
    return torch.nothing_like_this

def passed_on():
    try:
        shapes()
    except RuntimeError:
        raise

def told(kind=ValueError):
    try:
        {}["key"]
    except KeyError as error:
        raise kind("no such key") from error

def late(kind):
    raise kind("rank 0, in step(): no answer from rank 1 after 5.0 s (time limit of 5 s passed)")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Return a module in the place of a mutant's `zero`; the parent of its folder is the root."""
    file = tmp_path_factory.mktemp("root") / "zero" / "made_up.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("made_up", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def root_of(library: ModuleType) -> Path:
    assert library.__file__ is not None
    return Path(library.__file__).parent.parent


def error_of(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise RuntimeError("it raised nothing")


def imports_nothing() -> None:
    import nothing_like_this  # type: ignore[import-not-found] # noqa: F401


def names_nothing() -> None:
    nothing_like_this  # type: ignore[name-defined] # noqa: B018, F821


def fails_to_raise() -> None:
    with pytest.raises(ValueError, match="this"):
        pass


def raises_another(call: Callable[[], object]) -> None:
    with pytest.raises((ValueError, RuntimeError), match="another message"):
        call()


def out_of_time() -> None:
    pytest.fail("Timeout (>60.0s) from pytest-timeout.")


def asserts() -> None:
    assert torch.ones(1) == 2


CASES: dict[str, tuple[Callable[[ModuleType], object], How]] = {
    "a test's assertion": (lambda _: asserts(), How.ASSERTION),
    "an error that did not come": (lambda _: fails_to_raise(), How.ASSERTION),
    "a documented error with another message": (lambda m: raises_another(m.documented), How.ASSERTION),
    "a documented error": (lambda m: m.documented(), How.ERROR),
    "a documented type error": (lambda m: m.documented(TypeError), How.ERROR),
    "a documented error with a cause": (lambda m: m.told(), How.ERROR),
    "pytest's time limit": (lambda _: out_of_time(), How.TIME_LIMIT),
    "the library's time limit": (lambda m: m.late(PeerError), How.TIME_LIMIT),
    "an import error": (lambda _: imports_nothing(), How.OTHER),
    "a name error": (lambda _: names_nothing(), How.OTHER),
    "an attribute error of the library": (lambda m: m.attribute(), How.OTHER),
    "an index error": (lambda _: [][0], How.OTHER),
    "a key error by a raise": (lambda m: m.documented(KeyError), How.OTHER),
    "shapes that do not fit": (lambda m: m.shapes(), How.OTHER),
    "shapes that do not fit, passed on": (lambda m: m.passed_on(), How.OTHER),
    "shapes that do not fit, where another error was expected": (lambda m: raises_another(m.shapes), How.OTHER),
    "an assertion of the library": (lambda m: m.asserted(), How.OTHER),
    "a value error of Python": (lambda _: int("x"), How.OTHER),
    "something not implemented": (lambda m: m.documented(NotImplementedError), How.OTHER),
}


@pytest.mark.parametrize("name", CASES)
def test_only_assertions_documented_errors_and_time_limits_are_kills(name: str, library: ModuleType) -> None:
    call, how = CASES[name]
    assert judge(error_of(lambda: call(library)), root_of(library)) is how


@pytest.mark.parametrize("name", ["a test's assertion", "a documented error", "an index error"])
def test_of_several_ranks_those_decide_that_were_not_told_by_another(name: str, library: ModuleType) -> None:
    call, how = CASES[name]
    own, told = error_of(lambda: call(library)), error_of(lambda: library.documented(PeerError))
    for raised in (own, told):
        assert judge(raised, root_of(library), [told, own]) is how


def test_one_rank_s_crash_is_no_kill_whatever_the_others_say(library: ModuleType) -> None:
    ranks = [error_of(asserts), error_of(library.attribute)]
    assert judge(ranks[0], root_of(library), ranks) is How.OTHER


def test_several_failures_of_one_test_must_all_be_kills(library: ModuleType) -> None:
    class SeveralError(Exception):
        exceptions: tuple[BaseException, ...] = ()

    group = SeveralError()
    group.exceptions = (error_of(asserts), error_of(library.documented))
    assert judge(group, root_of(library)) is How.ASSERTION
    group.exceptions += (error_of(library.shapes),)
    assert judge(group, root_of(library)) is How.OTHER


PROCESS = 'Traceback (most recent call last):\n  File "{file}", line {line}, in program\n    ...\n{name}: {text}\n'


@pytest.mark.parametrize(
    ("name", "line", "how"),
    [("ValueError", 5, How.ERROR), ("RuntimeError", 10, How.OTHER), ("IndexError", 5, How.OTHER)],
)
def test_processes_are_judged_by_their_tracebacks(name: str, line: int, how: How, library: ModuleType) -> None:
    own = PROCESS.format(file=library.__file__, line=line, name=name, text="this")
    told = PROCESS.format(file=library.__file__, line=5, name="PeerError", text="rank 1 failed")
    error = ProgramError({1: (name, "this"), 3: ("PeerError", "rank 1 failed")}, f"rank 1:\n{own}\nrank 3:\n{told}")
    assert judge(error, root_of(library)) is how
    asserted = PROCESS.format(file=__file__, line=1, name="AssertionError", text="")
    error = ProgramError({0: ("AssertionError", "")}, f"rank 0:\n{asserted}")
    assert judge(error, root_of(library)) is How.ASSERTION
    assert judge(TimeoutError("rank 1 did not answer within 60 s"), root_of(library)) is How.TIME_LIMIT
