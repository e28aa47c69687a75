"""A clip by kernels has the bits of the plain loop's; what they do not know is clipped by the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from collectives import Transport, on_threads
from collectives.kernels import kernels_of
from zero import ZeroOptimizer
from zero.step import update

from ..support.built_kernels import built_kernels, put_in
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits
from ..support.programs import Program, Round, Step, check
from ..support.rows import rows
from ..support.small import blocks

pytestmark = [pytest.mark.usefixtures("unseen")]
INF = float("inf")


@pytest.fixture(autouse=True)
def launched() -> Iterator[list[str]]:
    """Return the names of the kernels that are launched, on tensors of the CPU."""
    names: list[str] = []
    with put_in(built_kernels(names.append)):
        yield names


def clips(*max_norms: float) -> tuple[tuple[float, float], ...]:
    return tuple((max_norm, 2.0) for max_norm in max_norms)


STEPS = (Step(clips=clips(0.3, 0.2, INF)), Step((Round(), Round(sync=False)), clips=clips(0.1)), Step())
OVERFLOWS = (Step(clips=clips(0.1)), Step(overflow=(1, 0), clips=clips(0.1)), Step(clips=clips(0.1)))


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "program",
    rows(
        [
            Program(3, 0, steps=STEPS),
            Program(3, 3, precision=PRECISIONS["bf16"], steps=STEPS),
            Program(4, 2, sharding_factor=2, steps=STEPS),
            Program(2, 2, scaled=True, steps=OVERFLOWS, precision=PRECISIONS["fp16"]),
        ],
        [
            Program(1, 2, steps=STEPS),
            Program(3, 1, steps=STEPS, precision=PRECISIONS["bf16, added up in bf16"]),
            Program(2, 0, scaled=True, steps=OVERFLOWS),
            Program(4, 3, sharding_factor=2, steps=STEPS, precision=PRECISIONS["fp32, added up in bf16"]),
        ],
    ),
    ids=lambda program: f"{program.stage}-W{program.world_size}",
)
def test_it_is_that_of_the_plain_loop(program: Program, launched: list[str]) -> None:
    check(program)
    count = sum(len(step.clips) for step in program.steps) * program.world_size
    assert [launched.count(name) for name in ("norm_limbs", "clip_factor", "scale")] == [count] * 3


@pytest.mark.parametrize("value", [INF, float("nan")])
def test_gradients_that_are_not_finite_are_scaled_as_by_the_host(value: float) -> None:
    """Where a NaN is, not which: each device has its own."""
    found = on_threads(2, lambda transport: clipped(transport, value))
    with put_in(None):
        expected = on_threads(2, lambda transport: clipped(transport, value))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(mine.nan_to_num(7), its.nan_to_num(7)) for mine, its in zip(ours, theirs, strict=True))


def test_a_parameter_without_a_gradient_is_not_scaled(launched: list[str]) -> None:
    """Later gradients are added to -0.0 in its place, also where the factor was NaN."""

    def program(transport: Transport) -> bool:
        model = blocks()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=2, process_group=transport)
        model(torch.full((4, 4), float("nan"))).sum().backward()
        optimizer.set_full_grad(model[0].weight, None)
        optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(4, 4)).sum().backward()
        gradient = optimizer.full_grad(model[0].weight)
        return gradient is not None and bool(gradient.isfinite().all())

    assert on_threads(2, program) == [True, True]
    assert "scale" in launched


@pytest.mark.parametrize("case", ["another norm", "fp64", "an error if it is not finite"])
def test_what_kernels_do_not_know_is_clipped_by_the_host(case: str, launched: list[str]) -> None:
    if case == "another norm":
        check(Program(2, 2, steps=(Step(clips=((0.3, 3.0),)), Step(clips=((0.3, INF),)))))
    elif case == "fp64":
        check(Program(2, 2, dtype=torch.float64, steps=STEPS))
    else:
        with pytest.raises(RuntimeError, match="non-finite"):
            on_threads(2, lambda transport: clipped(transport, INF, error=True))
    assert "norm_limbs" not in launched


def clipped(transport: Transport, value: float, *, error: bool = False) -> list[torch.Tensor]:
    """Return two norms, and the parameters after a step. Only rank 0 has the value among its inputs."""
    model = blocks()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=2, process_group=transport)
    model(torch.full((4, 4), value if transport.rank == 0 else 2.0)).sum().backward()
    norms = [optimizer.clip_grad_norm_(most, error_if_nonfinite=error) for most in (0.5, 0.4)]
    optimizer.step()
    return [*norms, *model.state_dict().values()]


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
