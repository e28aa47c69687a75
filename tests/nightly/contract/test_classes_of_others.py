"""Optimizer classes with states in 8 bits or fewer train the plain loop's bits, by blocks and by parameter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import ZeroOptimizer, load, save

from ...contract.recipes import assert_same_dict
from ...support.loops import seeded
from ...support.plain import plain_step
from ...support.pool import GlooPool

pytestmark = pytest.mark.timeout(300)  # such libraries are slow


RATE = {"lr": 1e-2}


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found.square().mean()


TOGETHER = 6  # micro-batches of a step, shared by the ranks


def blocks_of_8_bits() -> nn.Module:
    """Return a model with matrices that are large enough for states in 8 bits, and vectors that are not."""
    return seeded(3, lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))


def of_8_bits(step: int, micro: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + micro))


def class_of(library: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"{library}.optim"), name)


def in_8_bits(
    group: Any, rank: int, library: str, name: str, partition: str, how: int, steps: range, folder: Path, of: int
) -> dict[str, Tensor]:
    """Train on one process: from the checkpoint unless ``steps`` begin with 0, and save one then. ``how``: the stage;
    ``of``: the number of ranks."""
    model = blocks_of_8_bits()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps, for each shape
        optimizer = ZeroOptimizer(
            model,
            class_of(library, name),
            stage=how,
            process_group=group,
            divisor=TOGETHER,
            partition=partition,
            **RATE,
        )
        owned = 2 if partition == "block" else 4  # the matrices are cut
        assert f"by parameter: {owned} parameters" in str(optimizer.describe())
        if steps.start:
            load(folder / "saved", optimizer, rng=False)
        for step in steps:
            for micro in range(rank, TOGETHER, of):
                squares(model, of_8_bits(step, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()["state"][0]
        kept = states["state1"].dtype if library == "bitsandbytes" else type(states["exp_avg"])
        assert kept not in (torch.float32, Tensor), "the matrix is too small for states in 8 bits"
        if not steps.start:
            save(folder / "saved", optimizer)
        optimizer.close()
        return copy.deepcopy(model.state_dict())


OF_8_BITS = [
    *(("bitsandbytes", name) for name in ("AdamW8bit", "Lion8bit")),
    *(("torchao", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
]


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize(
    ("library", "name", "stage"), [(*each, number % 4) for number, each in enumerate((*OF_8_BITS, *OF_8_BITS))]
)
@pytest.mark.parametrize("partition", ["parameter", "block"])
def test_classes_with_states_in_8_bits_give_the_bits_of_the_plain_loop(
    gloo: GlooPool, library: str, name: str, stage: int, partition: str, tmp_path: Path
) -> None:
    """Also after a checkpoint, at another stage and number of ranks. On processes: bitsandbytes needs one a rank."""
    plain = blocks_of_8_bits()
    optimizer = class_of(library, name)(plain.parameters(), **RATE)
    expected = []
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            plain_step(plain, optimizer, squares, [of_8_bits(step, micro) for micro in range(TOGETHER)], TOGETHER)
            optimizer.zero_grad()
            expected.append(copy.deepcopy(plain.state_dict()))
    for ranks, how, steps in ((2, stage, range(3)), (3, (stage + 1) % 4, range(3, 5))):
        for found in gloo.run(in_8_bits, library, name, partition, how, steps, tmp_path, ranks, ranks=range(ranks)):
            assert_same_dict(found, expected[steps.stop - 1])
