"""`zero checkpoint` lists, verifies and names what is broken, and its exports keep every bit."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import zero
from zero import ZeroOptimizer, open_checkpoint
from zero.commands import cli

from ..support.models import Odd, build, odd_batches, take_steps
from ..support.plain import assert_same_model, assert_same_value

BATCHES = odd_batches(6)
STATE = {"epoch": 3, "rates": [0.1, float("inf"), None], "seen": torch.arange(3), "scheduler": {"last_epoch": 2}}
NUMPY = {"rng": (np.arange(3), np.float32(0.1)), "all": OrderedDict(counts=Counter("aab"), a=b"1", b=np.int64(2))}
PLAIN = {"rng": (torch.arange(3), float(np.float32(0.1))), "all": OrderedDict(counts=Counter("aab"), a=b"1", b=2)}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95)}


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return two param groups with names, which are not in the order of the model."""
    named = list(module.named_parameters())
    wide = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
    rest = [(name, parameter) for name, parameter in named if parameter.ndim <= 1]
    return [{"params": wide}, {"params": rest, "weight_decay": 0.0}]


def plain_run(count: int) -> tuple[Odd, torch.optim.Optimizer]:
    module = build()
    optimizer = torch.optim.AdamW(groups(module), **OPTIONS)
    take_steps(module, optimizer, BATCHES[:count])
    return module, optimizer


def run(*arguments: object) -> int:
    return cli.main(["checkpoint", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    module, assets, path = build(), tmp_path / "assets", tmp_path / "runs" / "step-00000003"
    optimizer = ZeroOptimizer(groups(module), torch.optim.AdamW, module=module, **OPTIONS)
    take_steps(module, optimizer, BATCHES[:3])
    assets.mkdir()
    (assets / "config.json").write_text('{"width": 7}')
    path.parent.mkdir()
    zero.save(path, optimizer, STATE | NUMPY, step=3, assets=assets)
    optimizer.close()
    return path


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_the_table_has_every_checkpoint_and_says_why_one_is_not_complete(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, cut, damaged = open_checkpoint(saved).content[:12], saved.parent / "step-00000004", saved.parent
    shutil.copytree(saved, cut)
    (cut / "state.safetensors").write_bytes(b"")
    shutil.copytree(saved, damaged / "step-00000005")
    flip(damaged / "step-00000005" / "checkpoint.json", 200)
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file() and path.name != "checkpoint.json")
    assert run("list", saved / "model") == 0
    assert capsys.readouterr().out == f"{saved / 'model'} has no checkpoints\n"
    assert run("list", saved) == 0, "a checkpoint itself"
    alone = capsys.readouterr().out.splitlines()
    assert run("list", saved.parent) == 0
    _, header, _, whole, shorter, unreadable = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "bytes", "written", "by", "content", "files"]
    assert re.split(r"  +", whole) == ["3", f"{size:,}", "ranks: 1, stage: 2", content, "complete"]
    assert re.split(r"  +", alone[-1]) == re.split(r"  +", whole)
    assert re.search(rf" {content} +{cut}/state.safetensors has 0 bytes instead of ", shorter)
    assert re.match(r"5 +\? +\? +\? .*step-00000005/checkpoint.json: its text ", unreadable)


def test_what_is_broken_is_named_by_file_and_tensor_and_not_exported_and_the_rest_is_verified(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = saved.parent / "step-00000004"
    shutil.copytree(saved, other)
    file = saved / "optimizer" / "optimizer-00001-of-00001.safetensors"
    content = open_checkpoint(saved).content[:12]
    assert run("verify", saved) == run("verify", saved.parent) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: whole, step 3, content {content}" for path in (saved, saved, other)
    ]
    flip(file, -1)
    assert run("verify", saved.parent) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{other}: whole, step 3, content {content}\n"
    assert shown.err.startswith(f"error: {file} is broken at block 0 (")
    assert "'state.one.exp_avg'" in shown.err
    assert run("verify", saved) == 1
    for to in ("torch", "hf", "dcp"):
        assert run("export", saved, "--to", to, tmp_path / "out") == 1
    assert capsys.readouterr().err.count(f"error: {file} is broken at block 0 (") == 4
    assert not (tmp_path / "out").exists()


def test_torch_reads_an_exported_file_as_the_plain_loop_has_it(saved: Path, tmp_path: Path) -> None:
    assert run("export", saved, "--to", "torch", tmp_path / "file") == 0
    found, (expected, reference) = torch.load(tmp_path / "file", weights_only=True), plain_run(3)
    assert_same_value(found["state"], STATE | PLAIN, "values of NumPy are tensors and numbers")
    assert [type(found["state"]["all"]), type(found["state"]["all"]["counts"])] == [OrderedDict, Counter]
    assert_same_value(found["model"], dict(expected.state_dict()), "the model")
    assert_same_value(found["optimizer"], reference.state_dict(), "the optimizer")


def test_a_transformers_folder_has_the_model_its_index_and_what_was_saved_beside(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "hf"
    assert run("export", saved, "--to", "hf", out) == 0
    config, file, index = sorted(out.iterdir())
    assert (config.name, config.read_text()) == ("config.json", '{"width": 7}')
    (expected, _), module = plain_run(3), Odd()
    safetensors.torch.load_model(module, file)
    assert_same_model(module, expected)
    assert index.name == "model.safetensors.index.json"
    assert json.loads(index.read_text())["weight_map"] == dict.fromkeys(safetensors.torch.load_file(file), file.name)


def test_torch_distributed_checkpoint_loads_model_and_optimizer_and_trains_on(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.checkpoint import state_dict as names
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    assert run("export", saved, "--to", "dcp", tmp_path / "dcp") == 0
    assert capsys.readouterr() == (f"{saved}: written to {tmp_path}/dcp for dcp, without state\n", "")
    flat = names.StateDictOptions(flatten_optimizer_state_dict=True)
    module = Odd()
    optimizer = torch.optim.AdamW([{"params": [p for _, p in group["params"]]} for group in groups(module)])
    weights, states = names.get_state_dict(module, optimizer, options=flat)
    loaded: dict[str, Any] = {"model": weights, "optimizer": states}
    planner = DefaultLoadPlanner(allow_partial_load=True)  # an unused parameter has no state, and `names` makes one
    load(loaded, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
    names.set_state_dict(
        module, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=flat
    )
    expected, reference = plain_run(3)
    take_steps(module, optimizer, BATCHES[3:])
    take_steps(expected, reference, BATCHES[3:])
    assert_same_model(module, expected)
