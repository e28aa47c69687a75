"""On one GPU, streams, checkpoints, saves, fused Adam and captures keep the plain loop's bits.

Where there is no GPU the tests run on the CPU, which only shows that their code works.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Chain, Work, solo
from collectives.algorithms.base import Launched
from collectives.algorithms.ordered_sum import AddedAside, Aside, ordered_sum
from zero import CheckpointManager, Offload, ZeroOptimizer, load, save

from ..support.devices import DEVICE, HAS_GPU, deterministic, deterministic_products, on
from ..support.models import build, odd_batches, odd_loss, seeded
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from .streams import CYCLES, PATTERNS, train, train_plainly

ADAMW: dict[str, Any] = {"lr": 1e-2, "fused": True}


def each(cpu: int, **settings: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test with every combination of settings on a GPU, and with the last ``cpu`` of them where there is none."""
    rows = [(DEVICE, *row) for row in itertools.product(*settings.values())]
    return pytest.mark.parametrize(("device", *settings), rows if HAS_GPU else rows[-cpu:])


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic_products(), deterministic():
        yield


@each(2, stage=range(4), cap=[0.03, 25.0], offload=[None, Offload("cpu")], pattern=PATTERNS)
@pytest.mark.filterwarnings("ignore:offload")
def test_the_parts_of_a_step_may_have_streams_of_their_own(
    device: str, stage: int, cap: float, offload: Offload | None, pattern: str
) -> None:
    model, norms = train(device, pattern, stage=stage, bucket_cap_mb=cap, offload=offload)
    plain, expected = train_plainly(device)
    assert_same_model(model, plain)
    for ours, theirs in zip(norms, expected, strict=True):
        assert_same_bits(ours, theirs)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], loss_of: Any) -> None:
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@each(1, stage=[1, 3], decay=[0.1, 1e-4])
@pytest.mark.filterwarnings("ignore:Adam is not element-wise")
def test_fused_adam_with_a_decay_gives_the_bits_of_the_plain_loop(device: str, stage: int, decay: float) -> None:
    """On CUDA its kernel rounds the decay otherwise for some lengths: a parameter then has one owner."""
    model = seeded(2, lambda: nn.Linear(701, 901)).to(device)
    plain, batches = copy.deepcopy(model), torch.randn(6, 4, 701, generator=torch.Generator().manual_seed(2)).to(device)
    options = {"lr": 1e-2, "weight_decay": decay, "fused": True}
    optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, **options)
    for side, its_optimizer in ((model, optimizer), (plain, torch.optim.Adam(plain.parameters(), **options))):
        take_steps(side, its_optimizer, batches, lambda side, batch: side(batch).square().mean())  # type: ignore[arg-type]
    optimizer.close()
    assert_same_model(model, plain)


@each(2, pair=[("there", "cpu"), ("cpu", "there"), ("there", "there")], stage=[0, 2, 1, 3])
def test_a_checkpoint_goes_from_a_device_to_another(
    device: str, pair: tuple[str, str], stage: int, tmp_path: Path
) -> None:
    first, second = (device if name == "there" else "cpu" for name in pair)
    options: dict[str, Any] = {"mixed_precision": PRECISIONS["bf16"] if stage % 2 else None, "lr": 1e-2}
    optimizer = ZeroOptimizer(model := build().to(first), stage=stage, **options)
    take_steps(model, optimizer, on(first, odd_batches(3)), odd_loss)
    save(tmp_path / "saved", optimizer)
    drawn = torch.rand(4, device=first)
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict()
    optimizer.close()
    following = ZeroOptimizer(again := build(7).to(second), stage=(stage + 1) % 4, **options)
    load(tmp_path / "saved", following)
    if first == second:
        assert_same_bits(torch.rand(4, device=second), drawn)
    following.consolidate_state_dict(0)
    assert_same_states(following.state_dict(), states)
    following.close()
    assert_same_model(again, model)


@each(1)
def test_saves_of_a_running_training_are_of_their_step(device: str, tmp_path: Path) -> None:
    optimizer, expected = ZeroOptimizer(model := build().to(device), stage=3, **ADAMW), list[nn.Module]()
    with CheckpointManager(tmp_path, optimizer) as manager:
        for step, batch in enumerate(on(device, odd_batches(6)), 1):
            take_steps(model, optimizer, [batch], odd_loss)
            with optimizer.gathered():
                expected.append(build(9).to(device))
                expected[-1].load_state_dict(model.state_dict())
            manager.save(step)
    for step, then in enumerate(expected, 1):
        following = ZeroOptimizer(again := build(9).to(device), stage=1, **ADAMW)
        load(tmp_path / f"step-{step:08d}", following)
        following.close()
        assert_same_model(again, then)


class Adds:
    """A work that adds three times the source, late, on the current stream."""

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source, self._out = source, out

    def wait(self) -> None:
        if self._out.is_cuda:
            torch.cuda._sleep(CYCLES)
        ordered_sum([self._source] * 3, self._out)


@each(1, is_awaited=[False, True])
def test_a_sum_aside_lies_between_its_launch_and_its_wait_or_end(device: str, is_awaited: bool) -> None:
    source, out = torch.zeros(1 << 16, device=device), torch.zeros(1 << 16, device=device)
    aside, found = Aside().of(source.device), list[Tensor]()
    for number in range(8):
        if source.is_cuda:
            torch.cuda._sleep(CYCLES)
        source.fill_(number)
        adds: Any = Adds(source, out)
        work: Work = adds
        if aside is None:
            work.wait()
        else:
            work = AddedAside(solo(), Launched(Chain(()), adds), aside, source.device, (source, out))
            if is_awaited:
                work.wait()
            del work
        found.append(out.clone())
        source.zero_()
        out.zero_()
    assert torch.stack(found).unique(dim=1).flatten().tolist() == [3.0 * number for number in range(8)]


@pytest.mark.skipif(not HAS_GPU, reason="the CPU has no CUDA graphs")
@each(1, stage=range(4))
def test_a_capture_for_a_cuda_graph_is_refused(device: str, stage: int) -> None:
    model, batch = nn.Linear(8, 8, device=device), torch.ones(4, 8, device=device)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    take_steps(model, optimizer, [batch] * 2, lambda model, batch: model(batch).sum())
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="CUDA graph"):
        model(batch).sum().backward()
    optimizer.close()
