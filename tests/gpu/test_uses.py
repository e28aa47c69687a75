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
from torch import nn

from zero import CheckpointManager, Offload, ZeroOptimizer, load, save

from ..support.devices import DEVICE, HAS_GPU, deterministic, deterministic_products, on
from ..support.models import build, odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from .streams import PATTERNS, train, train_plainly

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


@each(1, stage=[1, 3], decay=[0.1, 1e-4])
@pytest.mark.filterwarnings("ignore:Adam is not element-wise")
def test_fused_adam_with_a_decay_gives_the_bits_of_the_plain_loop(device: str, stage: int, decay: float) -> None:
    """On CUDA its kernel rounds the decay otherwise for some lengths: a parameter then has one owner."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model, batches = nn.Linear(701, 901), torch.randn(6, 4, 701)
    plain = copy.deepcopy(model).to(device)
    model, batches = model.to(device), batches.to(device)
    options = {"lr": 1e-2, "weight_decay": decay, "fused": True}
    optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, **options)
    reference = torch.optim.Adam(plain.parameters(), **options)
    sides: list[tuple[nn.Module, torch.optim.Optimizer]] = [(model, optimizer), (plain, reference)]
    for batch, (side, its_optimizer) in itertools.product(batches, sides):
        side(batch).square().mean().backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    optimizer.close()
    assert_same_model(model, plain)


@each(2, pair=[("there", "cpu"), ("cpu", "there"), ("there", "there")], stage=[0, 2, 1, 3])
def test_a_checkpoint_goes_from_a_device_to_another(
    device: str, pair: tuple[str, str], stage: int, tmp_path: Path
) -> None:
    """The states, the parameters and, on the same kind of device, the random generators."""
    first, second = (device if name == "there" else "cpu" for name in pair)
    precision = PRECISIONS["bf16"] if stage % 2 else None
    model = build().to(first)
    options: dict[str, Any] = {"stage": stage, "mixed_precision": precision, "lr": 1e-2}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **options)
    for batch in on(first, odd_batches(3)):
        odd_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(tmp_path / "saved", optimizer)
    drawn = torch.rand(4, device=first)
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict()
    optimizer.close()
    again = build(7).to(second)
    following = ZeroOptimizer(again, torch.optim.AdamW, **{**options, "stage": (stage + 1) % 4})
    load(tmp_path / "saved", following)
    if first == second:
        assert_same_bits(torch.rand(4, device=second), drawn)
    following.consolidate_state_dict(0)
    assert_same_states(following.state_dict(), states)
    following.close()
    assert_same_model(again, model)


@each(1)
def test_saves_of_a_running_training_are_of_their_step(device: str, tmp_path: Path) -> None:
    """The files are written beside the steps that follow, from a copy on the host."""
    model, batches = build().to(device), on(device, odd_batches(6))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, **ADAMW)
    expected = []
    with CheckpointManager(tmp_path, optimizer) as manager:
        for step, batch in enumerate(batches, 1):
            odd_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.gathered():
                expected.append([parameter.detach().clone() for parameter in model.parameters()])
            manager.save(step)
    optimizer.close()
    for step, values in enumerate(expected, 1):
        again = build(9).to(device)
        following = ZeroOptimizer(again, torch.optim.AdamW, stage=1, **ADAMW)
        load(tmp_path / f"step-{step:08d}", following)
        following.close()
        for ours, theirs in zip(again.parameters(), values, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.skipif(not HAS_GPU, reason="the CPU has no CUDA graphs")
@each(1, stage=range(4))
def test_a_capture_for_a_cuda_graph_is_refused(device: str, stage: int) -> None:
    model, batch = nn.Linear(8, 8, device=device), torch.ones(4, 8, device=device)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    for _ in range(2):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="CUDA graph"):
        model(batch).sum().backward()
    optimizer.close()
