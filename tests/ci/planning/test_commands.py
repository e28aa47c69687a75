"""`zero plan` names a change that fits where nothing does, draws, and recommends a command that trains."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from zero.commands import cli

from ...planning.configs import LLAMA_3_8B, SMALL
from ...support.pictures import misfits

MODULE = """import torch
def alone():
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
def model():
    return alone(), lambda made: made(torch.ones(8, 512, dtype=torch.bfloat16)).sum()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with two configs, a module and a text."""
    monkeypatch.chdir(tmp_path)
    for name, content in (("small", SMALL), ("large", LLAMA_3_8B)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "made.py").write_text(MODULE)
    (tmp_path / "text").write_text("bottles of beer on the wall\n" * 300)


def plan(flags: str) -> int:
    return cli.main(["plan", *shlex.split(flags), "--out=out"])


def written() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/plan.json").read_text())
    return found


def test_where_nothing_fits_it_names_a_change_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--config=large.json --cluster=h100:8 --sequence=8192"
    assert plan(flags) == 1
    error = capsys.readouterr().err
    assert error == "error: no setting fits into 77.7 GB of a rank: --checkpoint selective would fit\n"
    assert written()["recommended"] is None
    assert plan(f"{flags} --checkpoint=selective") == 0
    flags = "--config=large.json --sequence=512 --nic=100 --micro=200 --checkpoint=full --global-batch=400"
    assert plan(f"{flags} --cluster=rtx4090:2") == 1
    error = capsys.readouterr().err
    hosts, named = error.split("(")[1].split()[0], re.findall(r"--[a-z-]+ \w+", error)
    assert error.endswith(" would fit\n")
    assert plan(f"{flags} --cluster=rtx4090:2x{hosts} {' '.join(named)}") == 0
    assert plan(f"{flags} --cluster=rtx4090:2x{int(hosts) - 1} --global-batch={400 * (int(hosts) - 1)}") == 1


def test_it_draws_pictures_with_room_for_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn = {}
    monkeypatch.setattr(figure.Figure, "savefig", lambda figure, path, **_: drawn.update({path.name: figure}))
    assert plan("--config=small.json --cluster=h100:8x2 --sequence=512") == 0
    assert {name: misfits(picture) for name, picture in drawn.items()} == {"plan.png": [], "plan-scale.png": []}


def test_a_module_is_built_without_memory_and_counted_with_its_loss() -> None:
    for name, counted in (("alone", "not counted"), ("model", "counted")):
        assert plan(f"--module=made:{name}") == 0
        found = {"name": f"made:{name}", "parameters": 3 * 513 * 512, "units": 4, "activations": counted}
        assert written()["model"] == found


def test_the_recommended_command_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--preset=tiny --cluster=cpu:2 --precision=fp32 --sequence=32") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("start: zero "))
    flags = shlex.split(line.removeprefix("start: zero "))
    assert cli.main([*flags, "--steps=2", "--data=text", "--out=run"]) == 0
    assert json.loads(Path("run/run.json").read_text())["params_sha256"]
