"""Options that do not go together are one table: the page has its rows, and each row is an error of its constructor."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from zero import Offload, StochasticRounding, ZeroOptimizer
from zero.config import Config, ShardingOptions
from zero.core.conflicts import CONFLICTS, OF_CONFIG, OF_OFFLOAD, OF_OPTIONS, OF_PLAN, OF_SHARDING
from zero.planning.setting import PlanSetting

from ..files import TESTS, rows

PAGE = TESTS.parent / "zero/contract/limits.md"
HOST, STEPPED = Offload("cpu", parameters="cpu"), Offload("cpu", parameters="cpu", step="cpu")


def shared(**options: Any) -> int:
    """Return how many of four ranks share a unit between its forward and its backward."""
    return ShardingOptions(**options).reshard_group_size(4)


RAISE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sharding_factor=2 with stage 0": (shared, {"stage": 0, "sharding_factor": 2}),
    "units= with stage 2": (ShardingOptions, {"units": bool}),
    "reshard_after_forward=False with stage 1": (shared, {"stage": 1, "reshard_after_forward": False}),
    "prefetch_depth=0 with stage 0": (ShardingOptions, {"stage": 0, "prefetch_depth": 0}),
    'Offload(parameters="cpu") with stage 2': (ShardingOptions, {"offload": HOST}),
    'rounding= with partition="block"': (
        PlanSetting,
        {"optimizer": "adamw8bit", "partition": "block", "rounding": StochasticRounding()},
    ),
    "mesh= with process_group=": (Config, {"module": None, "process_group": 1, "mesh": 2}),
    "mesh= with sharding_factor=": (Config, {"module": None, "process_group": None, "mesh": 1, "sharding_factor": 1}),
    'bucket_cap_mb="auto" without a module': (
        ZeroOptimizer,
        {"params": [nn.Parameter(torch.ones(1))], "bucket_cap_mb": "auto"},
    ),
    'Offload(folder) with parameters="cpu"': (Offload, {"states": "here", "parameters": "cpu"}),
    'Offload(step="cpu") without parameters="cpu"': (Offload, {"states": "cpu", "step": "cpu"}),
    "Offload with a class of torchao in zero plan, 'adamw8bit'": (
        PlanSetting,
        {"optimizer": "adamw8bit", "partition": "block", "offload": Offload("here")},
    ),
    'Offload("cpu") with parameters on the CPU in zero plan': (PlanSetting, {"offload": Offload("cpu")}),
    "Offload(step=\"cpu\") with Muon in zero plan, 'muon'": (
        PlanSetting,
        {"stage": 3, "device": "cuda", "optimizer": "muon", "offload": STEPPED},
    ),
}


def words(options: str) -> set[str]:
    """Return the words of options, without values in braces."""
    return set(re.findall(r"[A-Za-z_]{3,}", re.sub(r"\{.*?\}", "", options)))


def test_the_page_has_each_conflict_with_its_reason_and_its_remedy_and_no_other_row() -> None:
    table, named = rows(PAGE, "options"), set[str]()
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
    call, arguments = RAISE[begin]
    with pytest.raises(ValueError, match=re.escape(f"{begin}: ")) as raised:
        call(**arguments)
    ends = {f": {conflict.why}: {conflict.remedy}" for conflict in CONFLICTS}
    assert str(raised.value).removeprefix(begin) in ends


def test_each_conflict_of_a_record_is_raised_above() -> None:
    assert len(RAISE) == len((*OF_SHARDING, *OF_OPTIONS, *OF_CONFIG, *OF_OFFLOAD, *OF_PLAN))
