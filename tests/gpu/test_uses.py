"""What users do on one GPU beside plain steps: streams, two devices, checkpoints, Muon, autocast, compiled models.

Where there is no GPU the tests run on the CPU, which only shows that their code works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import CheckpointManager, Offload, ZeroOptimizer, load, save

from ..contract.test_cuda import DEVICES, STAGES, deterministic, deterministic_products, on
from ..contract.test_cuda import train as train_odd
from ..support.models import build, odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from .streams import PATTERNS, train, train_plainly

pytestmark = pytest.mark.contract

ADAMW: dict[str, Any] = {"lr": 1e-2, "fused": True}
PAIRS = pytest.mark.parametrize(("before", "after"), [("there", "cpu"), ("cpu", "there"), ("there", "there")])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set up torch for deterministic results on a device."""
    with deterministic_products(), deterministic():
        yield request.param


@STAGES
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("cap", [0.03, 25.0])
@pytest.mark.parametrize("offload", [None, Offload("cpu")], ids=["", "offload"])
@pytest.mark.filterwarnings("ignore:offload")
@pytest.mark.by_default("cpu--25.0-each part-2", "cpu-offload-0.03-each part-3")
def test_the_parts_of_a_step_may_have_streams_of_their_own(
    device: str, pattern: str, stage: int, cap: float, offload: Offload | None
) -> None:
    model, norms = train(device, pattern, stage=stage, bucket_cap_mb=cap, offload=offload)
    plain, expected = train_plainly(device)
    assert_same_model(model, plain)
    for ours, theirs in zip(norms, expected, strict=True):
        assert_same_bits(ours, theirs)


def train_beside(
    ours: tuple[nn.Module, ZeroOptimizer],
    plain: tuple[nn.Module, torch.optim.Optimizer],
    batches: Iterable[Tensor],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Train a model and the plain loop's beside it, and assert that they have the same bits."""
    for batch in batches:
        for model, optimizer in (ours, plain):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    ours[1].close()
    assert_same_model(ours[0], plain[0])


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.square().mean()


class TwoDevices(nn.Module):
    """An embedding on the CPU, and layers where they are put: autograd has a thread for each."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)).to(device)
        self.scale = nn.Parameter(torch.full((32,), 0.5))
        self.device = device

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        hidden, beside = embedded.to(self.device), embedded
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
            beside = torch.sin(beside * self.scale)
        return hidden.square().mean().cpu() + beside.square().mean()


def two_devices(device: str) -> tuple[nn.Module, list[Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return TwoDevices(device), list(torch.randint(0, 50, (5, 20)))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("cap", [0.0005, 25.0])
@pytest.mark.parametrize("loop", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_parameters_may_be_on_two_devices(device: str, stage: int, cap: float, loop: dict[str, bool]) -> None:
    model, batches = two_devices(device)
    plain, _ = two_devices(device)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, bucket_cap_mb=cap, lr=1e-2, **loop)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, **loop)
    train_beside((model, optimizer), (plain, reference), batches, lambda trained, batch: trained(batch))


@pytest.mark.parametrize("decay", [0.1, 1e-4])
@pytest.mark.parametrize("stage", [1, 3])
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
    train_beside((model, optimizer), (plain, reference), batches, mean_square)


@STAGES
@PAIRS
@pytest.mark.by_default("cpu-there-there-1", "cpu-there-there-3")
def test_a_checkpoint_goes_from_a_device_to_another(
    device: str, stage: int, before: str, after: str, tmp_path: Path
) -> None:
    """The states, the parameters and, on the same kind of device, the random generators."""
    first, second = (device if name == "there" else "cpu" for name in (before, after))
    precision = PRECISIONS["bf16"] if stage % 2 else None
    model = build().to(first)
    options: dict[str, Any] = {"stage": stage, "mixed_precision": precision, "lr": 1e-2}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **options)
    train_odd(model, optimizer, on(first, odd_batches(3)))
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


def layers(device: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return two equal models, and batches."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model, batches = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 40)), torch.randn(5, 8, 48)
    return model.to(device), copy.deepcopy(model).to(device), batches.to(device)


@STAGES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_what_is_there_now(device: str, stage: int, dtype: torch.dtype) -> None:
    """It remembers the casts of a forward."""
    model, plain, batches = layers(device)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW)

    def loss_of(trained: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, dtype):
            return (trained(batch) + trained(batch / 2)).float().square().mean()

    train_beside((model, optimizer), (plain, reference), batches, loss_of)


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_model_gives_the_bits_of_the_plain_one_compiled(device: str, stage: int) -> None:
    model, plain, batches = layers(device)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for layer in (*model, *plain):  # units are compiled one by one
        layer.compile()
    train_beside((model, optimizer), (plain, reference), batches, mean_square)


@STAGES
@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
def test_muon_steps_whole_matrices(device: str, stage: int) -> None:
    model, plain = (nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16)).to(device) for _ in range(2))
    plain.load_state_dict(model.state_dict())

    def groups(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        parameters = list(module.parameters())
        return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]

    matrices, rest = groups(model)
    optimizer = ZeroOptimizer(
        [
            {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02},
            {"params": rest, "optimizer_class": torch.optim.AdamW, "lr": 1e-2},
        ],
        module=model,
        stage=stage,
    )
    matrices, rest = groups(plain)
    references = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]
    for batch in torch.randn(4, 8, 24, device=device):
        model(batch).square().mean().backward()
        plain(batch).square().mean().backward()
        for stepped in (optimizer, *references):
            stepped.step()
            stepped.zero_grad()
    optimizer.close()
    assert_same_model(model, plain)


@STAGES
def test_a_capture_for_a_cuda_graph_is_refused(device: str, stage: int) -> None:
    if device == "cpu":
        pytest.skip("the CPU has no CUDA graphs")
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
