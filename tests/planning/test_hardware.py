"""Presets have a unit and a source for each value; a cluster is named by a text; measured files are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zero.planning.hardware import PRESETS, UNITS, hardware_of, presets, read_hardware
from zero.planning.seconds.compute import CONSTANTS, FIT

ROOT = Path(__file__).resolve().parent.parent.parent


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PRESETS.read_text())
    return found


def quantities(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, leaf) of parsed JSON: every number, and every object with a value."""
    if isinstance(data, dict) and "value" not in data:
        for key, inside in data.items():
            yield from quantities(inside, f"{place}.{key}" if place else key)
    elif not isinstance(data, str):
        yield place, data


def test_every_preset_has_a_unit_and_a_source() -> None:
    leaves = [(place, leaf) for place, leaf in quantities(data()) if place != "format"]
    assert len(leaves) > 100
    for place, leaf in leaves:
        assert leaf.keys() == {"value", "unit", "source"}, place
        assert leaf["unit"] in UNITS, place
        assert leaf["source"].strip(), place


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (30, 'fabrics.typical must be an object of "value", "unit" and "source"'),
        ({"value": 30, "unit": "us"}, 'fabrics.typical must be an object of "value", "unit" and "source"'),
        ({"value": 30, "unit": "us", "source": " "}, "fabrics.typical: a value needs a source"),
        ({"value": 30, "unit": "GB", "source": "a page"}, "the unit must be one of us, ms, not 'GB'"),
        ({"value": 0, "unit": "us", "source": "a page"}, "the value must be a number above 0, not 0"),
        ({"value": "30", "unit": "us", "source": "a page"}, "the value must be a number above 0, not '30'"),
    ],
)
@pytest.mark.by_default
def test_a_constant_without_a_unit_or_a_source_is_refused(value: object, message: str) -> None:
    changed = data()
    changed["fabrics"]["typical"] = value
    with pytest.raises(ValueError, match=message):
        hardware_of(changed, None)


def test_every_constant_of_the_equations_has_a_unit_a_range_and_a_source() -> None:
    for name, constant in CONSTANTS.items():
        assert constant.unit.strip(), name
        assert constant.source.strip(), name
        assert constant.low <= constant.value <= constant.high, name
    assert sum(constant.source == FIT for constant in CONSTANTS.values()) <= 20


def test_every_gpu_has_the_constants_of_its_family() -> None:
    for gpu in presets().gpus.values():
        assert f"matmul.{gpu.family}" in CONSTANTS, gpu.name
        assert f"attention.{gpu.family}" in CONSTANTS, gpu.name


def test_the_presets_are_those_that_the_library_names() -> None:
    names = "v100-32 a100-40 a100-80 h100 h100-hbm2e h200 b200 gb200 l40s rtx4090 cpu"
    assert presets().gpus.keys() == set(names.split())
    assert presets().fabrics == pytest.approx({"good": 10e-6, "typical": 30e-6, "poor": 90e-6})


def test_the_wheel_contains_the_presets() -> None:
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("zero = ["))
    assert '"planning/*.json"' in line


def test_a_text_names_a_cluster() -> None:
    cluster = presets().cluster("h100:8x16")
    assert (cluster.gpu.name, cluster.per_host, cluster.hosts, cluster.ranks) == ("h100", 8, 16, 128)
    assert cluster.nic == 400e9
    assert cluster.network.ring_step == pytest.approx(30e-6)
    assert presets().cluster("h100:8x16", nic=400, fabric="good").nic == 50e9
    assert presets().cluster("a100-80").ranks == presets().cluster("a100-80:8").ranks == 8
    assert cluster.with_hosts(2).ranks == 16


def test_the_usual_network_is_as_much_for_each_gpu() -> None:
    for text in ("h100:8x2", "h100:4x2", "h100:1x2", "gb200:4x36", "gb200:72x2"):
        cluster = presets().cluster(text)
        assert cluster.nic / cluster.per_host == 50e9, text


def test_a_rack_of_one_domain_counts_as_one_host_for_its_links() -> None:
    assert presets().cluster("gb200:4x16").per_domain == 64
    assert presets().cluster("gb200:4x36").per_domain == 72
    assert presets().cluster("h100:8x16").per_domain == 8


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("h10:8x2", {}, "no GPU is called 'h10': did you mean 'h100'?"),
        ("toaster", {}, "no GPU is called 'toaster': choose one of a100-40, "),
        ("h100:8x", {}, "give GPU, GPUs a host and hosts, as in h100:8x16"),
        ("h100:0x2", {}, "give GPU, GPUs a host and hosts, as in h100:8x16"),
        ("rtx4090:8x2", {}, "2 hosts of 'rtx4090', and no network is usual for it: give the Gb/s of a host"),
        ("h100:8x2", {"nic": 0}, "give the Gb/s that a host sends into the network, above 0"),
        ("h100:8x2", {"fabric": "goodd"}, "no fabric is called 'goodd': did you mean 'good'?"),
    ],
)
@pytest.mark.by_default
def test_a_cluster_that_there_is_not_is_an_error_with_a_remedy(
    text: str, options: dict[str, Any], message: str
) -> None:
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "the file must be an object, not list"),
        ('{"format": 2}', "format is 2, and this version reads 1"),
        ('{"format": 1, "machine": "x"}', "date of the measurement missing"),
        ('{"format": 1, "machine": "x", "date": "y", "network": {"bas": 1}}', "unknown key 'bas': did you mean 'base'"),
        ('{"format": 1, "machine": "x", "date": "y", "gpus": {"h": {}}}', "gpus.h: family, flops, memory, "),
    ],
)
@pytest.mark.by_default
def test_a_measured_file_that_is_wrong_is_an_error_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hardware.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"hardware file .*hardware.json: .*{message}"):
        read_hardware(file)
