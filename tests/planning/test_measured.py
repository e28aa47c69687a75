"""What was measured on a machine becomes the file of hardware that explains it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.planning.hardware import _SECONDS, Hardware, hardware_of, presets
from zero.planning.measured import Measurement, Rates, TimedPasses
from zero.planning.model import UnitWork
from zero.planning.seconds.compute import ATTENTION_BACKWARD, CONSTANTS, Compute

TRUE = Rates(product=1 / 70e9, attention=1 / 30e9, moved=1 / 6e9, launch=30e-6, launch_backward=20e-6, weight=1 / 5e9)
WORKS = [
    (
        UnitWork(12.0 * width * width * tokens, 4.0 * tokens * tokens * width, 90.0 * width * tokens, kernels=24),
        48.0 * width**2,
    )
    for width in (64, 128, 256, 512)
    for tokens in (32, 128, 512)
]


def timed(rates: Rates, work: UnitWork, weights: float) -> TimedPasses:
    """Return passes that take what the rates say."""
    products = rates.product * work.matmul_flops + rates.moved * work.moved_bytes + rates.weight * weights
    attention = rates.attention * work.attention_flops
    forward = products + attention + rates.launch * work.kernels
    backward = 2 * products + ATTENTION_BACKWARD * attention + rates.launch_backward * work.kernels
    return TimedPasses(work, weights, forward, backward)


def measured(rates: Rates, **changes: Any) -> Measurement:
    given: dict[str, Any] = {
        "machine": "a machine",
        "date": "2026-11-25",
        "ranks": 2,
        "memory": 8.0 * 2**30,
        "rates": rates,
        "products": {"float32": 60e9, "bfloat16": 1e9},
        "copied": 10e9,
        "updated": 15e9,
        "message": 50e-6,
        "disk": 3e9,
    }
    return Measurement(**{**given, **changes})


def read(measurement: Measurement) -> Hardware:
    return hardware_of(json.loads(json.dumps(measurement.to_json())), presets())


def test_the_fit_gives_back_the_rates_that_made_the_passes() -> None:
    found = Rates.fitted([timed(TRUE, *each) for each in WORKS], 60e9, 10e9)
    for field in dataclasses.fields(Rates):
        assert getattr(found, field.name) == pytest.approx(getattr(TRUE, field.name), rel=1e-6)


@given(st.lists(st.floats(0.9, 1.1), min_size=24, max_size=24))
def test_the_fit_of_noisy_passes_is_never_negative_and_explains_them(noise: list[float]) -> None:
    passes = [timed(TRUE, *each) for each in WORKS]
    noisy = [
        dataclasses.replace(each, forward=each.forward * noise[2 * n], backward=each.backward * noise[2 * n + 1])
        for n, each in enumerate(passes)
    ]
    found = Rates.fitted(noisy, 60e9, 10e9)
    assert min(dataclasses.astuple(found)) >= 0
    errors = [abs(timed(found, *each).forward / other.forward - 1) for each, other in zip(WORKS, noisy, strict=True)]
    assert sum(errors) / len(errors) < 0.1


def test_attention_that_short_passes_do_not_show_is_no_faster_than_products() -> None:
    works = [(dataclasses.replace(work, attention_flops=0.0), weights) for work, weights in WORKS]
    found = Rates.fitted([timed(TRUE, *each) for each in works], 60e9, 10e9)
    assert found.attention == pytest.approx(1 / 60e9)
    assert found.product == pytest.approx(TRUE.product, rel=1e-6)


@pytest.mark.parametrize("missing", [field.name for field in dataclasses.fields(Rates)])
def test_what_costs_nothing_is_still_a_file_that_can_be_read(missing: str) -> None:
    read(measured(dataclasses.replace(TRUE, **{missing: 0.0})))


def test_the_equations_give_back_what_was_measured() -> None:
    """All but the products: a file has four digits."""
    cluster = read(measured(TRUE)).cluster("cpu:2")
    compute = Compute(cluster.gpu, "float32")
    for work, weights in WORKS:
        passes = compute.passes(work, hidden=64, weight_bytes=weights)
        wanted = timed(TRUE, work, weights)
        host = CONSTANTS["unit_host"].value
        assert passes.forward + passes.host - host == pytest.approx(wanted.forward, rel=2e-3)
        assert passes.backward + passes.host_backward - host == pytest.approx(wanted.backward, rel=2e-3)


def test_a_measured_machine_has_its_memory_its_ranks_and_its_disk() -> None:
    cluster = read(measured(TRUE)).cluster("cpu:2")
    assert (cluster.gpu.memory, cluster.gpu.per_host) == (8 * 2**30, 2)
    assert cluster.gpu.host_link == pytest.approx(3e9)
    assert cluster.network.base == pytest.approx(50e-6)
    assert read(measured(TRUE)).measured == "a machine, 2026-11-25"


@pytest.mark.parametrize(("name", "unit"), [("launch", "1"), ("elementwise", "us"), ("weights", "ms")])
def test_a_constant_with_a_unit_of_another_kind_is_refused(name: str, unit: str) -> None:
    written = measured(TRUE).to_json()
    written["gpus"]["cpu"]["constants"][name]["unit"] = unit
    with pytest.raises(ValueError, match=rf"gpus.cpu.constants.{name}: the unit must be one of"):
        hardware_of(written, presets())


def test_the_constants_that_are_seconds_are_those_of_the_equations() -> None:
    seconds = {name for name, constant in CONSTANTS.items() if re.match(r"seconds of (the host|a step)", constant.unit)}
    assert seconds == _SECONDS


def test_a_constant_that_there_is_not_is_named() -> None:
    written = measured(TRUE).to_json()
    written["gpus"]["cpu"]["constants"]["lanch"] = {"value": 1, "unit": "1", "source": "a test"}
    gpu = hardware_of(written, presets()).gpu("cpu")
    with pytest.raises(ValueError, match="no constant is called 'lanch'"):
        Compute(gpu, "float32")
