"""Optimizer classes of other libraries train the plain loop's bits, or are refused with the reason."""

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
from ...support.parts import parts_of
from ...support.plain import plain_step
from ...support.pool import GlooPool
from ...support.sides import AsPlain, same_as_plain

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]  # such libraries are slow


class Shapes(nn.Module):
    """A model with parameters of no, one, two and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.kernels = nn.Conv2d(1, 6, 3)
        self.head = nn.Linear(6 * 4 * 4, 37)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.kernels(images)).flatten(1)) * self.scale
        return found


TAKES_A_MINUTE = ("Kron", "SpectralSphere")  # they compile for a minute, and are then refused
RATE = {"lr": 1e-2}


@pytest.mark.timeout(1500)
def test_every_class_of_a_collection_is_refused_or_trains_the_bits() -> None:
    collection = pytest.importorskip("pytorch_optimizer")
    found = {name: getattr(collection, name) for name in dir(collection) if name not in TAKES_A_MINUTE}
    verdicts: dict[str, str] = {}
    for name, cls in found.items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            verdicts[name] = verdict_on(cls)
    counted = list(verdicts.values())
    assert {*counted} == {"refused", "same bits", "needs other arguments"}, verdicts
    assert counted.count("same bits") > 90  # 93 in pytorch_optimizer 4.1, 39 of these with an owner for each parameter
    assert counted.count("refused") < 20  # 16, among them those that look at all parameters together
    together = {"DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy"}
    assert {verdicts[name] for name in together} == {"refused"}


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found.square().mean()


def verdict_on(cls: type[torch.optim.Optimizer]) -> str:
    """Train with a class that needs only a rate, on two ranks at stages 2 and 3; return the outcome."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(4, 1, 6, 6, generator=generator) for _ in range(30)]

    def loop(side: Any) -> None:
        for step in range(0, len(images), 2):
            side.train(lambda model, rank, step=step: squares(model, images[step + rank]))
            side.step()
            side.clear()

    try:
        loop(AsPlain(seeded(5, Shapes), lambda updated: cls(updated, **RATE), 2))
    except Exception:
        return "needs other arguments"
    try:
        for stage in (2, 3):
            settings = {"stage": stage, "bucket_cap_mb": 2e-3}
            same_as_plain(loop, lambda: seeded(5, Shapes), cls, settings=settings, **RATE)
    except ValueError as error:
        return "refused" if "cannot be sharded" in str(error) or "refuses" in str(error) else str(error)
    except AssertionError:
        return "other bits"
    return "same bits"


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
        assert {spec.blocks for spec in parts_of(optimizer).storage.layout.parameters} == {False, partition == "block"}
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
