"""README's script and the examples have the bits of one rank, or of the plain loop, on any number of ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero.examples import finetune_lora
from zero.examples.resume_on_other_ranks import train

from ...support.limits import PATIENT
from ...support.loops import ROOT
from ...support.plain import assert_same_value

pytestmark = pytest.mark.timeout(400)  # a launcher and its ranks are started several times
README = (ROOT / "README.md").read_text()


def shown_by(folder: Path, ranks: int, *words: str) -> str:
    """Run a script in a folder as a user starts it, under torchrun."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=4 * PATIENT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def sha256_of(shown: str) -> str:
    (found,) = re.findall(r"SHA-256 (?:of the parameters )?([0-9a-f]{64})$", shown, re.MULTILINE)
    return str(found)


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(found)


def plain_loop() -> str:
    """Return README's script without the lines that its diff adds, and with those that it removes."""
    script, lines = block("python"), block("diff").splitlines(keepends=True)
    removed = added = ""
    for line in [*lines, " "]:
        if added and not line.startswith("+"):
            assert script.count(added) == 1
            script, removed, added = script.replace(added, removed), "", ""
        removed += line[1:] * line.startswith("-")
        added += line[1:] * line.startswith("+")
    assert "ZeroOptimizer(" not in script
    return script


def test_the_script_of_readme_trains_the_bits_of_the_loop_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(block("python"))
    assert shown_by(tmp_path, 2, "script.py") == "", "it prints nothing"
    trained = torch.load(tmp_path / "model.pt", weights_only=True)
    monkeypatch.chdir(tmp_path)
    exec(plain_loop(), {})
    assert_same_value(trained, torch.load("model.pt", weights_only=True), "the model")


def test_a_run_that_stops_goes_on_with_three_ranks_and_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(step: int, words: str) -> None:
        with pytest.raises(
            SystemExit, match=rf"^--stop-after {step}: \S+ has step {words} of 24, so give one after it$"
        ):
            train(str(tmp_path / "stopped"), 2, step)

    train(str(tmp_path / "whole"), 2, None)  # one rank: this process
    whole = capsys.readouterr().out
    assert whole.startswith("begins after step 0 of 24, ranks: 1, stage: 2\n")
    refused(0, 0)
    train(str(tmp_path / "stopped"), 2, 10)
    assert capsys.readouterr().out.startswith("begins after step 0 of 24, ranks: 1, stage: 2\nstopped after step 10")
    for step in (3, 10, 25):
        refused(step, 10)
    script = ("-m", "zero.examples.resume_on_other_ranks", str(tmp_path / "stopped"), "--stage=3")
    resumed = shown_by(tmp_path, 3, *script)
    assert resumed.startswith("begins after step 10 of 24, ranks: 3, stage: 3\n")
    assert sha256_of(resumed) == sha256_of(whole)


def test_scripts_have_the_same_bits_on_two_ranks_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    from zero.examples import accelerate_loop

    hf_trainer = pytest.importorskip("zero.examples.hf_trainer")

    def alone(main: Any, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *words])
        main()
        return sha256_of(capsys.readouterr().out)

    words = ("--output_dir", str(tmp_path / "run"), "--max_steps=6", "--save_steps=3", "--eval_steps=3")
    expected = alone(hf_trainer.main, *words, "--stage=1")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert sha256_of(shown_by(tmp_path, 2, "-m", "zero.examples.hf_trainer", *words, "--stage=3")) == expected
    half = shown_by(tmp_path, 2, "-m", "zero.examples.accelerate_loop", "--stage=2", "--epochs=1", "--folder=run-2")
    resumed = alone(accelerate_loop.main, "--stage=3", "--epochs=2", f"--resume={tmp_path / 'run-2'}")
    assert alone(accelerate_loop.main, "--stage=0", "--epochs=2") == resumed != sha256_of(half)
    expected = alone(finetune_lora.main, "--epochs=2", "--stage=0")
    lora = ("-m", "zero.examples.finetune_lora", "--epochs=2", "--adapters=adapters.pt")
    assert sha256_of(shown_by(tmp_path, 2, *lora)) == expected
    adapters = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert len(adapters) == 2 * 9
    assert all(name.endswith((".down", ".up")) for name in adapters)
    for name in ("", "/dev/null"):
        with pytest.raises(SystemExit, match=f"^--data '{name}' must be a file of at least 640 bytes$"):
            hf_trainer.samples(name)
