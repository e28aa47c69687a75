"""`zero plan` writes and draws what it recommends, says how to start it, and names what would fit."""

from __future__ import annotations

import inspect
import itertools
import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import zero
from zero.commands import cli
from zero.commands.plan import command
from zero.commands.plan.command import planner_of, start_of
from zero.commands.plan.settings import PlanConfig
from zero.planning.choose import SAME
from zero.planning.setting import OPTIMIZERS, PlanSetting
from zero.precision import PRECISIONS

from ...planning.configs import LLAMA_3_8B, SMALL

MODULE = """import torch
from zero.examples.train import ByteModel
def bytes_model():
    tokens = torch.empty(1, 64, dtype=torch.int64, device="meta")
    return ByteModel(), lambda made: made(tokens).float().logsumexp(-1).mean()
def alone():
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
def model():
    return alone(), lambda made: made(torch.ones(8, 512, dtype=torch.bfloat16)).sum()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with two configs and a module."""
    monkeypatch.chdir(tmp_path)
    for name, content in (("small", SMALL), ("large", LLAMA_3_8B)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "made.py").write_text(MODULE)


def plan(flags: str) -> int:
    return cli.main(["plan", *shlex.split(flags), "--out=out"])


def written() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/plan.json").read_text())
    return found


def start(precision: Any = "fp32", fp32_modules: str | None = None, **changes: Any) -> str:
    """Return how a setting of a small model on one host starts."""
    named = {"precision": precision, "fp32_modules": fp32_modules, "optimizer": changes.get("optimizer", "adamw")}
    planner = planner_of(PlanConfig(module="made:bytes_model", sequence=64, **named))
    setting = PlanSetting(**{"stage": 3, "world_size": 2, "mixed_precision": planner.training.rule, **changes})
    return start_of(setting, planner)


def test_it_prints_a_table_and_a_recommendation_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--config=small.json --cluster=h100:8x2 --sequence=512 --global-batch=64 --tokens=1e9 --price=2 --trace"
    assert plan(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small: 3.46 M parameters in 5 units, ")
    assert "16 h100 (2 hosts, 3,200 Gb/s a host)" in lines[0]
    begins = ("recommended: zero ", "of its time: ", "bucket_cap_mb: ", "start: ", "smallest cluster that fits", "$")
    assert [begin for begin in begins if not any(line.startswith(begin) for line in lines)] == []
    found = written()
    fitting = [each for each in found["choices"] if each["total_bytes"] <= found["cluster"]["usable_bytes"]]
    near = min(each["step"]["seconds"] for each in fitting) * (1 + SAME)
    best = next(each for each in fitting if each["name"] == found["recommended"]["name"])
    others = [each for each in fitting if each["step"]["seconds"] <= near and each["setting"]["offload"] is None]
    assert best["total_bytes"] == min(each["total_bytes"] for each in others)
    assert {str(choice["setting"]["offload"])[:17] for choice in found["choices"]} == {"None", "{'states': 'cpu',"}
    for choice in found["choices"]:
        assert sum(choice["bytes"].values()) == choice["total_bytes"]
    explained = [line.split(": ")[0] for line in lines if line.startswith("plan")]
    assert explained == (["plan.png", "plan-scale.png"] if find_spec("matplotlib") else [])
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in trace} == {"X", "M"}


def test_the_files_of_the_last_plan_stay_until_there_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--config=small.json --cluster=h100:8 --sequence=512"
    assert plan(flags) == 0
    before = {path: path.stat().st_ino for path in Path("out").iterdir()}
    monkeypatch.setattr(command, "findings_of", Mock(side_effect=KeyboardInterrupt))
    assert plan(flags) == 130
    assert {path: path.stat().st_ino for path in Path("out").iterdir()} == before


def test_a_model_whose_states_are_larger_than_the_gpu_goes_to_one_with_its_parameters_on_the_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan("--config=large.json --cluster=h100:1 --recompute=full --sequence=512") == 0
    printed, found = capsys.readouterr().out, written()
    (best,) = (each for each in found["choices"] if each["name"] == found["recommended"]["name"])
    assert best["setting"]["offload"] == {"states": "cpu", "parameters": "cpu", "step": None}
    assert best["bytes"]["states"] < 1 << 20 < found["cluster"]["usable_bytes"] < best["offloaded_bytes"]
    assert "zero 3, states and parameters on host" in printed
    assert 'offload=Offload("cpu", parameters="cpu")' in printed


def test_the_start_is_the_call_of_the_optimizer() -> None:
    bound = inspect.signature(zero.ZeroOptimizer).bind

    def optimizer_of(*given: Any, **named: Any) -> dict[str, Any]:
        return bound(*given, **named).arguments

    names = {"torch": torch, "Offload": zero.Offload, "MixedPrecision": zero.MixedPrecision, "model": None}
    names |= {"ZeroOptimizer": optimizer_of, "matrices": [1], "rest": [2]}
    names["torchao"] = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=8, AdamW4bit=4, AdamWFp8=8))
    for optimizer, precision in zip(OPTIMIZERS, itertools.cycle(PRECISIONS), strict=False):
        in_blocks = OPTIMIZERS[optimizer][0].quantized is not None
        offload = None if in_blocks else zero.Offload("cpu", parameters="cpu" if optimizer == "adamw" else None)
        partition = "block" if in_blocks else None
        given = {"world_size": 8, "bucket_cap_mb": 3, "device": "cuda", "offload": offload, "partition": partition}
        found = eval(start(precision, **given, optimizer=optimizer), dict(names))
        assert (found["stage"], found["bucket_cap_mb"]) == (3, 3)
        assert (found.get("offload"), found.get("partition")) == (offload, partition)
        assert ("mixed_precision" in found) is (precision != "fp32")
        assert found.get("defaults", {}).get("fused", False) is not (in_blocks or optimizer in ("adagrad", "muon"))
    changes: dict[str, Any]
    for changes in ({"sharding_factor": 1}, {"reshard_after_forward": False}, {"prefetch_depth": 2}, {"stage": 0}):
        found = eval(start(**changes), dict(names))
        assert {name: found.get(name) for name in changes} == changes
    found = eval(start("bf16", "*norm*,bytes,head"), dict(names))
    kept = zero.MixedPrecision(torch.float32, output_dtype=torch.bfloat16)
    by_name = {"*": zero.MixedPrecision(torch.bfloat16), "*norm*": kept, "bytes": kept, "head": kept}
    assert found["mixed_precision"] == by_name


def test_modules_in_fp32_take_other_bytes_and_more_seconds() -> None:
    every = []
    for more in ("", "--fp32-modules 'bytes,head'"):
        assert plan(f"--module=made:bytes_model --cluster=h100:8 --sequence=64 --all {more}") == 0
        every.append({each["name"]: each for each in written()["choices"]})
    for name, plain in every[0].items():
        kept = every[1][name]
        assert kept["bytes"]["states"] < plain["bytes"]["states"] or kept["setting"]["stage"] > 0, name
        assert kept["step"]["seconds"] >= plain["step"]["seconds"], name


def test_where_nothing_fits_it_names_the_smallest_cluster_on_which_it_would(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--config=large.json --cluster=h100:2 --sequence=10240"
    assert plan(f"{flags} --micro=2") == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: no setting fits into 77.7 GB per rank: try --recompute full, --micro 1, more ho")
    assert written()["recommended"] is None
    (smallest,) = written()["smallest"]
    assert "smallest cluster that fits, recompute full: " in said.out
    per_host, ranks = smallest["setting"]["ranks_per_host"], smallest["setting"]["world_size"]
    there = f"--cluster=h100:{per_host}x{ranks // per_host} --micro=2 --recompute={smallest['recompute']}"
    assert plan(f"--config=large.json --sequence=10240 {there}") == 0


def test_a_module_is_built_without_memory_and_counted_with_its_loss() -> None:
    for name, counted in (("alone", "not counted"), ("model", "counted")):
        assert plan(f"--module=made:{name}") == 0
        found = {"name": f"made:{name}", "parameters": 3 * 513 * 512, "units": 4, "activations": counted}
        assert written()["model"] == found
