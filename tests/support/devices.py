"""The devices of tests that are about GPUs, and ranks on them.

Each such test also runs on the CPU, where everything specific to a GPU does nothing. That only shows that the test's
code works on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._pytree import tree_map_only

from .machine.backends import Processes
from .machine.program import Command
from .machine.ranks import Rank
from .pool import GlooPool

GPU = "cuda:0"
HAS_GPU = torch.cuda.is_available()
DEVICE = GPU if HAS_GPU else "cpu"
DEVICES = ("cpu", pytest.param(GPU, marks=pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")))
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # torch requires it for deterministic matrix products


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def deterministic_products() -> Iterator[None]:
    """Let torch choose deterministic matrix products; processes that start inside the block do so, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in DETERMINISTIC.items():
            patch.setenv(name, value)
        yield


@dataclass(frozen=True)
class Ranks:
    """Processes whose models are on one device. For a GPU they are spawned."""

    device: str
    pool: GlooPool

    def run(self, program: Any, *arguments: Any, world_size: int) -> Any:
        return self.pool.run(program, *arguments, ranks=range(world_size), limit=100)


class RankOnDevice(Rank):
    """A rank whose algorithms are deterministic, and whose results are on the CPU."""

    def __init__(self, *given: Any) -> None:
        with deterministic():
            super().__init__(*given)

    def do(self, command: Command) -> Any:
        with deterministic():
            return tree_map_only(torch.Tensor, torch.Tensor.cpu, super().do(command))

    def close(self) -> list[torch.Tensor]:
        return [value.cpu() for value in super().close()]


class OnDevice(Processes):
    rank: ClassVar[type[Rank]] = RankOnDevice


def on(device: str, batches: Sequence[Any]) -> list[Any]:
    return [(tokens.to(device), extra) for tokens, extra in batches]
