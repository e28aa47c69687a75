"""The tiers of the tests in `ROOMS`, which select what a run takes: `default`, `full` and `slow`. The other rooms have
their tiers by folder: `tests/ci` and `tests/nightly`.

    default   every row of the contract and every law once; `python -m pytest`
    full      the marker `full`: applications, many processes, compilation, and the cases that default leaves out
    slow      the marker `slow`: repeats a promise at another size

If a test has several parameters, default takes just enough cases to include each value of each parameter; the other
cases are in the full tier. `@pytest.mark.by_default("a", "b")` names the cases of a test instead, and
`@pytest.mark.by_default()` takes all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

TIERS = ("default", "full", "slow")
ROOMS = ("tests/commands/",)
COLLECTED = pytest.StashKey[dict[str, str]]()
"""The tier of every collected test, by its name from its file on: ``test_layout.py::test_...[...]``."""


def assign(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark the cases that default leaves out, and store the tier of each test in ``config.stash[COLLECTED]``."""
    whole = not any("::" in argument for argument in config.args)
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.nodeid.startswith(ROOMS):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        usual = [case for case in cases if tier(case) == "default"]
        taken = set(_by_default(usual, whole))
        for case in usual:
            if case not in taken:
                case.add_marker("full")
    config.stash[COLLECTED] = {item.nodeid.removeprefix("tests/"): tier(item) for item in items}


def tier(item: pytest.Item) -> str:
    """Return the tier of a test, one of `TIERS`."""
    return next((name for name in ("slow", "full") if item.get_closest_marker(name)), "default")


def _by_default(cases: Sequence[pytest.Function], whole: bool) -> list[pytest.Function]:
    """Return the cases of one test that default takes. ``whole``: ``cases`` are all of the test's cases."""
    marker = next((case.get_closest_marker("by_default") for case in cases), None)
    if marker is None:
        return _each_value(cases)
    named = {case.callspec.id: case for case in cases}
    if whole and not named.keys() >= set(marker.args):
        raise pytest.UsageError(f"{cases[0].nodeid}: no case is called {set(marker.args) - named.keys()}")
    return [named[name] for name in marker.args if name in named] if marker.args else list(cases)


def _each_value(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Return a few cases that include each value of each parameter.

    The choice is greedy: each next case adds the most new values. Among equals, later values win.
    """
    if any(not hasattr(case, "callspec") for case in cases):
        return list(cases)
    places: defaultdict[str, dict[int, int]] = defaultdict(
        dict
    )  # parameter -> a value's identity -> its place among the values
    for case in cases:
        for name, value in case.callspec.params.items():
            places[name].setdefault(id(value), len(places[name]))
    missing = {value for case in cases for value in _values(case)}
    left, taken = list(cases), list[pytest.Function]()
    while missing:
        best = max(
            left,
            key=lambda case: (
                len(missing.intersection(_values(case))),
                sum(places[name][value] / len(places[name]) for name, value in _values(case)),
            ),
        )
        left.remove(best)
        taken.append(best)
        missing.difference_update(_values(best))
    return taken


def _values(case: pytest.Function) -> Iterable[tuple[str, int]]:
    return [(name, id(value)) for name, value in case.callspec.params.items()]
