"""Every law and row of the contract has a test in the default run, and each conflict of options is on its page."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest

from zero import Offload, StochasticRounding
from zero.config import Config, ShardingOptions
from zero.core.conflicts import CONFLICTS, OF_CONFIG, OF_OFFLOAD, OF_OPTIONS, OF_PLAN, OF_SHARDING
from zero.planning.setting import PlanSetting

from .. import files

CONTRACT = files.TESTS.parent / "zero/CONTRACT.md"
COMMANDS = {"matrix"}  # are in no tier
ROOMS = {"core", "checkpoint", "collectives"}  # whose tests are about the inside: geometry, norm, manifest, wire
PRIVATE_READS = 30  # may only become fewer


def test_the_default_run_asserts_every_law() -> None:
    laws = files.laws()
    assert laws.keys() == {law for law, _ in files.rows(files.TESTS / "README.md", "law")}
    for law, tests in laws.items():
        assert any(tests.values()), f"nothing in the default run asserts: {law}"


def test_every_row_of_the_contract_names_files_and_the_default_run_has_one() -> None:
    default: dict[str, bool] = {}
    for path in files.TESTS.rglob("test_*.py"):
        default[path.stem] = default.get(path.stem, False) or files.in_default_run(path)
    table = files.rows(CONTRACT, "what varies")
    assert table
    for varies, _, asserted in table:
        named = [default[name] for name in re.findall(r"`(\w+)`", asserted) if name not in COMMANDS]
        assert not asserted or any(named), f"nothing in the default run asserts: {varies}"


def test_the_net_runs_against_other_insides() -> None:
    """`python -m tests.net` runs this tree's programs on the packages of another commit."""
    for file in ("side.py", "__main__.py"):
        assert not files.all_inside_names(files.TESTS / "net" / file)


def test_tests_read_no_more_private_attributes_of_the_library() -> None:
    found = []
    for path in files.TESTS.rglob("*.py"):
        nodes = [] if ROOMS & {*path.relative_to(files.TESTS).parts[:-1]} else ast.walk(ast.parse(path.read_text()))
        found += [f"{path.name}: {ast.unparse(node)}" for node in nodes if files.is_private_read(node)]
    assert len(found) <= PRIVATE_READS, found


PAGE = files.TESTS.parent / "zero/contract/limits.md"


def shared(**options: Any) -> int:
    """Return how many of four ranks share a unit between its forward and its backward."""
    return ShardingOptions(**options).reshard_group_size(4)


EIGHT = partial(PlanSetting, optimizer="adamw8bit", partition="block")
RAISE: dict[str, Callable[[], object]] = {
    "sharding_factor=2 with stage 0": lambda: shared(stage=0, sharding_factor=2),
    "units= with stage 2": lambda: ShardingOptions(units=bool),
    "reshard_after_forward=False with stage 1": lambda: shared(stage=1, reshard_after_forward=False),
    "prefetch_depth=0 with stage 0": lambda: ShardingOptions(stage=0, prefetch_depth=0),
    'Offload(parameters="cpu") with stage 2': lambda: ShardingOptions(offload=Offload("cpu", parameters="cpu")),
    'rounding= with partition="block"': lambda: EIGHT(rounding=StochasticRounding()),
    "mesh= with process_group=": lambda: Config(module=None, process_group=1, mesh=2),
    "mesh= with sharding_factor=": lambda: Config(module=None, process_group=None, mesh=1, sharding_factor=1),
    'bucket_cap_mb="auto" without a module': lambda: Config(module=None, process_group=None, bucket_cap_mb="auto"),
    'Offload(folder) with parameters="cpu"': lambda: Offload("here", parameters="cpu"),
    'Offload(step="cpu") without parameters="cpu"': lambda: Offload("cpu", step="cpu"),
    "Offload with a class of torchao in zero plan, 'adamw8bit'": lambda: EIGHT(offload=Offload("here")),
    'Offload("cpu") with parameters on the CPU in zero plan': lambda: PlanSetting(offload=Offload("cpu")),
    "Offload(step=\"cpu\") with Muon in zero plan, 'muon'": lambda: PlanSetting(
        stage=3, device="cuda", optimizer="muon", offload=Offload("cpu", parameters="cpu", step="cpu")
    ),
}


def words(options: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]{3,}", re.sub(r"\{.*?\}", "", options)))


def test_the_page_has_each_conflict_with_its_reason_and_its_remedy_and_no_other_row() -> None:
    table, named = files.rows(PAGE, "options"), set[str]()
    for conflict in CONFLICTS:
        of, ends = words(f"{conflict.option} {conflict.other}"), [conflict.why, conflict.remedy]
        (row,) = [options for options, *rest in table if rest == ends and of <= words(options)]
        named.add(row)
    for options in {options for options, *_ in table} - named:  # options that a plan cannot be given
        found = re.fullmatch(r"`(\w+)=` in `zero plan`", options)
        assert found is not None, f"{PAGE}: the row of {options} is none of CONFLICTS"
        assert found[1] not in {field.name for field in fields(PlanSetting)}


@pytest.mark.parametrize("begin", RAISE)
def test_a_conflict_is_an_error_that_names_both_options_the_reason_and_the_remedy(begin: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{begin}: ")) as raised:
        RAISE[begin]()
    ends = {f": {conflict.why}: {conflict.remedy}" for conflict in CONFLICTS}
    assert str(raised.value).removeprefix(begin) in ends


def test_each_conflict_of_a_record_is_raised_above() -> None:
    assert len(RAISE) == len((*OF_SHARDING, *OF_OPTIONS, *OF_CONFIG, *OF_OFFLOAD, *OF_PLAN))
