"""The example `zero.examples.train` trains the plain loop's bits, and takes GPUs only where each rank has its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import zero
from zero.examples import train

from ..support.loops import PlainLoop
from ..support.plain import assert_same_state_dict

FLAGS = ("--micro-batches=3", "--batch=4", "--epochs=2", "--save-every=2")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(60)))
    return tmp_path / "text"
