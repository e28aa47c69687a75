"""Tiny runs of `zero train`, what they leave, and the plain loop that they are compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero import MixedPrecision
from zero.commands.train.data import load_corpus
from zero.commands.train.model import build_model

from ..matrix import Variant, trained_sha256

ROOT = Path(__file__).parents[2]
LIMIT = 100  # seconds for a command; it takes about ten
STEPS, MICRO_BATCHES, BATCH, SEQUENCE = 3, 4, 2, 24
EQUAL = ("params_sha256", "losses", "validation_bits_per_byte")
Train = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class RunOutput:
    """What a run of `zero train` has left and printed. ``record``: the content of run.json."""

    out: Path
    record: dict[str, Any]
    shown: str
    checkpoints: Path


def flags(text: Path, out: Path, *more: str) -> list[str]:
    """Return the flags of a tiny run of `zero train`."""
    sizes = (f"--steps={STEPS}", f"--micro-batches={MICRO_BATCHES}", f"--batch={BATCH}", f"--sequence={SEQUENCE}")
    return ["--preset=tiny", *sizes, f"--data={text}", f"--out={out}", *more]


def run_json(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def equal_part(record: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs with the same bits have in common."""
    return {key: record[key] for key in EQUAL}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the root of the repository."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def trained_by_command(text: Path, out: Path, *more: str) -> dict[str, Any]:
    """Run `zero train` in a process of its own, and return the record of the run."""
    ended = command("-m", "zero.commands.cli", "train", *flags(text, out, *more))
    assert (ended.returncode, ended.stderr) == (0, "")
    return run_json(out)


def plain_sha256(
    text: Path, clip: float | None = None, precision: str = "", muon: bool = False, **arguments: Any
) -> str:
    """Train with a loop without this library: model and data of `zero train`, torch's optimizer."""
    torch.set_num_threads(1)
    corpus, model = load_corpus(text, SEQUENCE), build_model("tiny", SEQUENCE, seed=0)
    mixed = MixedPrecision({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]) if precision else None
    variant = Variant("", clip=clip, precision=mixed, scaled=precision == "fp16", muon=muon)
    return trained_sha256(corpus, model, STEPS, MICRO_BATCHES, (BATCH, SEQUENCE), variant, **arguments)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, which has nothing else."""
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == ".lock"
    return [int(name.removeprefix("step-")) for name in names[1:]]
