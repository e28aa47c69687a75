"""Random generators: each process has its own streams back, and a save leaves them as they are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zero
from zero.checkpoint.user_state import digests, generators

from ..support.pool import GlooPool
from .saves import Training


def test_a_save_leaves_the_random_streams_as_they_are(tmp_path: Path) -> None:
    training = Training(None, 0)
    before = digests(generators(), "rng")
    zero.save(tmp_path / "saved", training.optimizer)
    assert digests(generators(), "rng") == before


def _draws() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), float(np.random.rand()), random.random()


def _of_a_process(group: Any, rank: int, folder: str) -> tuple[Any, Any]:
    """Return the numbers that are drawn after a save, and after it was restored."""
    training = Training(group, 2)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    zero.save(folder, training.optimizer)
    expected = _draws()
    zero.load(folder, training.optimizer)
    return expected, _draws()


def test_each_process_has_its_own_random_streams_back(gloo: GlooPool, tmp_path: Path) -> None:
    found = gloo.run(_of_a_process, str(tmp_path / "saved"), ranks=(0, 1, 2))
    assert all(drawn == expected for expected, drawn in found)
    assert len({str(expected) for expected, _ in found}) == 3
