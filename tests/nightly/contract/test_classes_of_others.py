"""Training by classes with states in 8 bits or fewer goes on from a checkpoint with the plain loop's bits."""

from __future__ import annotations

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
TOGETHER = 6  # micro-batches of a step, shared by the ranks
OF_8_BITS = [("bitsandbytes", "AdamW8bit"), ("bitsandbytes", "Lion8bit")]
OF_8_BITS += [("torchao", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")]


def model_of() -> nn.Module:
    """Return a model with matrices that are large enough for states in 8 bits, and vectors that are not."""
    return seeded(3, lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def batch_of(step: int, micro: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + micro))


def class_of(library: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"{library}.optim"), name)


def in_8_bits(
    group: Any, rank: int, cls: tuple[str, str], partition: str, stage: int, steps: range, folder: Path, of: int
) -> dict[str, Tensor]:
    """Train on one of ``of`` processes: from the checkpoint unless ``steps`` begin with 0, and save one then."""
    model, given = model_of(), {"stage": stage, "divisor": TOGETHER, "partition": partition, "lr": 1e-2}
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps, for each shape
        optimizer = ZeroOptimizer(model, class_of(*cls), process_group=group, **given)
        owned = 2 if partition == "block" else 4  # the matrices are cut
        assert f"by parameter: {owned} parameters" in str(optimizer.describe())
        if steps.start:
            load(folder / "saved", optimizer, rng=False)
        for step in steps:
            for micro in range(rank, TOGETHER, of):
                loss_of(model, batch_of(step, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()["state"][0]
        kept = states["state1"].dtype if "state1" in states else type(states["exp_avg"])
        assert kept not in (torch.float32, Tensor), "the matrix is too small for states in 8 bits"
        if not steps.start:
            save(folder / "saved", optimizer)
        optimizer.close()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize(("number", "cls"), enumerate(OF_8_BITS))
@pytest.mark.parametrize("partition", ["parameter", "block"])
def test_training_goes_on_from_a_checkpoint_at_another_stage_and_number_of_ranks(
    gloo: GlooPool, number: int, cls: tuple[str, str], partition: str, tmp_path: Path
) -> None:
    """On processes: bitsandbytes needs one a rank."""
    plain = model_of()
    optimizer = class_of(*cls)(plain.parameters(), lr=1e-2)
    for ranks, stage, steps in ((2, number % 4, range(3)), (3, (number + 1) % 4, range(3, 5))):
        with torch.compiler.set_stance("force_eager"):
            for step in steps:
                plain_step(plain, optimizer, loss_of, [batch_of(step, micro) for micro in range(TOGETHER)], TOGETHER)
                optimizer.zero_grad()
        for found in gloo.run(in_8_bits, cls, partition, stage, steps, tmp_path, ranks, ranks=range(ranks)):
            assert_same_dict(found, plain.state_dict())
