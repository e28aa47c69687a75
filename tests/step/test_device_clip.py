"""A clip by kernels has the bits of the plain loop's; what they do not know is clipped by the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from collectives import Transport, on_threads
from collectives.kernels import kernels_of
from zero import ZeroOptimizer
from zero.step import update

from ..support.built_kernels import built_kernels, put_in
from ..support.errors import error_of
from ..support.machine import program as p
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.plain import assert_same_bits
from ..support.rows import only
from ..support.small import blocks

pytestmark = [pytest.mark.usefixtures("unseen")]
INF = float("inf")


@pytest.fixture(autouse=True)
def launched() -> Iterator[list[str]]:
    """Return the names of the kernels that are launched, on tensors of the CPU."""
    names: list[str] = []
    with put_in(built_kernels(names.append)):
        yield names


def clipped_steps(*clips: p.Clip) -> list[p.Command]:
    first = [p.Backward(1), *clips, p.Step(), p.ZeroGrad()]
    return [*first, p.Backward(2), p.Backward(3, sync=False), *clips, p.Step(), p.ZeroGrad()]


STEPS = clipped_steps(p.Clip(0.3), p.Clip(0.2), p.Clip(INF))
OVERFLOWS = [p.Scaled(1), p.Scaled(2, overflow=0), p.Scaled(3)]
OTHER_NORMS = clipped_steps(p.Clip(0.3, 3.0), p.Clip(0.3, INF))
ROWS: dict[str, tuple[p.Setting, list[p.Command], dict[str, Any], int]] = {  # with the clips by kernels of a rank
    "stage 0": (p.Setting(0, 3), STEPS, {}, 6),
    "stage 2": (p.Setting(2, 1), STEPS, {}, 6),
    "stage 3, bf16": (p.Setting(3, 3), STEPS, {"precision": "bf16"}, 6),
    "copies": (p.Setting(2, 4, sharding_factor=2), STEPS, {}, 6),
    "copies, sums in bf16": (p.Setting(3, 4, sharding_factor=2), STEPS, {"precision": "fp32, added up in bf16"}, 6),
    "scaled, fp16": (p.Setting(2, 2), OVERFLOWS, {"precision": "fp16"}, 3),
    "scaled": (p.Setting(0, 2), OVERFLOWS, {}, 3),
    "other norms": (p.Setting(2, 2), OTHER_NORMS, {}, 0),
    "fp64": (p.Setting(2, 2), STEPS, {"dtype": "float64"}, 0),
}


@pytest.mark.parametrize("row", only(ROWS, "stage 0", "stage 3, bf16"))
def test_it_is_that_of_the_plain_loop(row: str, launched: list[str]) -> None:
    setting, commands, changes, count = ROWS[row]
    run(p.Config(setting, (Part("linear"), Part("scalar"), Part("unused")), **changes), *commands)
    expected = [count * setting.world_size] * 3
    assert [launched.count(name) for name in ("norm_limbs", "clip_factor", "scale")] == expected


def clipped(transport: Transport, value: float, *, error: bool = False) -> list[torch.Tensor]:
    """Return two norms, and the parameters after a step. Only rank 0 has the value among its inputs."""
    model = blocks()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=2, process_group=transport)
    model(torch.full((4, 4), value if transport.rank == 0 else 2.0)).sum().backward()
    norms = [optimizer.clip_grad_norm_(most, error_if_nonfinite=error) for most in (0.5, 0.4)]
    optimizer.step()
    return [*norms, *model.state_dict().values()]


@pytest.mark.parametrize("value", [INF, float("nan")])
def test_gradients_that_are_not_finite_are_scaled_as_by_the_host_or_an_error(value: float, launched: list[str]) -> None:
    """Where a NaN is, not which: each device has its own."""
    found = on_threads(2, lambda transport: clipped(transport, value))
    with put_in(None):
        expected = on_threads(2, lambda transport: clipped(transport, value))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(mine.nan_to_num(7), its.nan_to_num(7)) for mine, its in zip(ours, theirs, strict=True))
    launched.clear()
    errors = on_threads(2, lambda transport: error_of(clipped, transport, value, error=True))
    assert all("non-finite" in error for error in errors)
    assert "norm_limbs" not in launched


def test_if_one_rank_has_no_kernels_all_clip_by_the_host(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    here = threading.local()

    def program(transport: Transport) -> list[torch.Tensor]:
        here.rank = transport.rank
        return clipped(transport, 3.0)

    monkeypatch.setattr(update, "kernels_of", lambda device: None if here.rank == 1 else kernels_of(device))
    found = on_threads(3, program)
    assert "norm_limbs" not in launched
    monkeypatch.undo()
    for ours, theirs in zip(found, on_threads(3, program), strict=True):
        assert "norm_limbs" in launched
        for mine, its in zip(ours, theirs, strict=True):
            assert_same_bits(mine, its)
