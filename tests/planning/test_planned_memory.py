"""What is planned is what ranks hold and send, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from collectives import Loopback

from .models import PLANNED, described
from .runs import WORLD_SIZES, Case, cases, check, covering, each_setting_once, pairs, plan_of

SAMPLE = covering(60)


def test_the_models_are_small_and_have_every_kind_of_parameter() -> None:
    models = [described(planned) for planned in PLANNED.values()]
    parameters = [parameter for model in models for parameter in model.parameters]
    assert all(model.numel < 10_000 and len(model.units) > 2 for model in models)
    assert not all(parameter.trainable for parameter in parameters)
    assert not all(parameter.used for parameter in parameters)
    assert {0, 1} < {parameter.numel for parameter in parameters}
    assert () in {parameter.shape for parameter in parameters}
    assert max(len(parameter.names) for parameter in parameters) == 2
    assert {parameter.group for parameter in parameters} == {0, 1}


def test_the_sample_covers_every_pair_of_values() -> None:
    everything = {pair for world_size in WORLD_SIZES for case in cases(world_size) for pair in pairs(case)}
    missing = everything - {pair for case in SAMPLE for pair in pairs(case)}
    assert len(missing) <= len(everything) / 100, missing


@pytest.mark.parametrize("case", SAMPLE, ids=str)
@pytest.mark.by_default
def test_a_rank_holds_and_sends_what_is_planned(case: Case, tmp_path: Path) -> None:
    check(case, plan_of(case.model), tmp_path, Loopback(case.setting.world_size))


@pytest.mark.slow
@pytest.mark.timeout(600)  # every case of a model on 8 ranks takes two minutes on two idle cores
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("model", PLANNED)
def test_so_it_is_under_every_setting_of_a_sweep(model: str, world_size: int, tmp_path: Path) -> None:
    plan = plan_of(model)
    every = [case for case in cases(world_size) if case.model == model]
    whole = settings.get_current_profile_name() == "thorough"
    for case in every if whole else each_setting_once(model, world_size):
        check(case, plan, tmp_path, Loopback(world_size))
