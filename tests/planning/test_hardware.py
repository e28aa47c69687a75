"""Presets and constants have units and sources; a text names a cluster; measured files are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero.planning.hardware import PRESETS, hardware_of, presets, read_hardware
from zero.planning.seconds.compute import CONSTANTS, FIT

WRONG_CONSTANTS = (
    (30, 'fabrics.typical must be an object of "value", "unit" and "source"'),
    ({"value": 30, "unit": "us"}, 'fabrics.typical must be an object of "value", "unit" and "source"'),
    ({"value": 30, "unit": "us", "source": " "}, "fabrics.typical: a value needs a source"),
    ({"value": 30, "unit": "GB", "source": "a page"}, "the unit must be one of us, ms, not 'GB'"),
    ({"value": 0, "unit": "us", "source": "a page"}, "the value must be a number above 0, not 0"),
    ({"value": "30", "unit": "us", "source": "a page"}, "the value must be a number above 0, not '30'"),
)
WRONG_CLUSTERS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("h10:8x2", {}, "no GPU is called 'h10': did you mean 'h100'?"),
    ("toaster", {}, "no GPU is called 'toaster': choose one of a100-40, "),
    ("h100:8x", {}, "give GPU, GPUs a host and hosts, as in h100:8x16"),
    ("h100:0x2", {}, "give GPU, GPUs a host and hosts, as in h100:8x16"),
    ("rtx4090:8x2", {}, "2 hosts of 'rtx4090', and no network is usual for it: give the Gb/s of a host"),
    ("h100:8x2", {"nic": 0}, "give the Gb/s that a host sends into the network, above 0"),
    ("h100:8x2", {"fabric": "goodd"}, "no fabric is called 'goodd': did you mean 'good'?"),
)
BEGIN = '{"format": 1, "machine": "x", "date": "y"'
WRONG_FILES = (
    ("{", "cannot be read as JSON"),
    ("[]", "the file must be an object, not list"),
    ('{"format": 2}', "format is 2, and this version reads 1"),
    ('{"format": 1, "machine": "x"}', "date of the measurement missing"),
    (BEGIN + ', "network": {"bas": 1}}', "unknown key 'bas': did you mean 'base'"),
    (BEGIN + ', "gpus": {"h": {}}}', "gpus.h: family, flops, memory, "),
)


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PRESETS.read_text())
    return found


def test_every_constant_of_the_equations_has_a_unit_a_range_and_a_source() -> None:
    for name, constant in CONSTANTS.items():
        assert constant.unit.strip(), name
        assert constant.source.strip(), name
        assert constant.low <= constant.value <= constant.high, name
    assert sum(constant.source == FIT for constant in CONSTANTS.values()) <= 20
    families = {gpu.family for gpu in presets().gpus.values()}
    assert {f"{kind}.{family}" for kind in ("matmul", "attention") for family in families} <= CONSTANTS.keys()


def test_a_preset_without_a_unit_or_a_source_is_refused() -> None:
    for value, message in WRONG_CONSTANTS:
        changed = data()
        changed["fabrics"]["typical"] = value
        with pytest.raises(ValueError, match=message):
            hardware_of(changed, None)


def test_a_text_names_a_cluster() -> None:
    cluster = presets().cluster("h100:8x16")
    assert (cluster.gpu.name, cluster.per_host, cluster.hosts, cluster.ranks) == ("h100", 8, 16, 128)
    assert (cluster.nic, cluster.network.ring_step) == (400e9, pytest.approx(30e-6))
    assert presets().cluster("h100:8x16", nic=400, fabric="good").nic == 50e9
    assert presets().cluster("a100-80").ranks == presets().cluster("a100-80:8").ranks == 8
    assert cluster.with_hosts(2).ranks == 16
    for text, in_domain in (("h100:1x2", 1), ("h100:8x16", 8), ("gb200:4x16", 64), ("gb200:4x36", 72)):
        found = presets().cluster(text)
        assert (found.nic / found.per_host, found.per_domain) == (50e9, in_domain), text


@pytest.mark.parametrize(("text", "options", "message"), WRONG_CLUSTERS)
def test_a_cluster_that_there_is_not_names_the_remedy(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        presets().cluster(text, **options)


def test_a_gpu_without_a_dtype_names_those_that_it_has() -> None:
    with pytest.raises(ValueError, match="GPU 'v100-32' has no products of bfloat16: choose one of float16, float32"):
        presets().gpu("v100-32").peak("bfloat16")


def test_a_measured_file_changes_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    cpu = data()["gpus"]["cpu"]
    cpu["efficiency"] = {"matmul": {"value": 0.5, "unit": "1", "source": "measured"}}
    base = {"value": 10, "unit": "us", "source": "measured"}
    file = tmp_path / "hardware.json"
    measured = {"format": 1, "date": "2026-11-24", "machine": "two cores", "gpus": {"here": cpu}}
    file.write_text(json.dumps({**measured, "network": {"base": base}}))
    hardware = read_hardware(file)
    assert hardware.measured == "two cores, 2026-11-24"
    assert hardware.gpu("here").efficiency == {"matmul": 0.5}
    assert hardware.network.base == pytest.approx(10e-6)
    assert hardware.network.hop_inside == presets().network.hop_inside
    assert hardware.gpus.keys() == presets().gpus.keys() | {"here"}


def test_a_measured_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    for text, message in WRONG_FILES:
        file.write_text(text)
        with pytest.raises(ValueError, match=f"hardware file .*hardware.json: .*{message}"):
            read_hardware(file)
