"""A sum in fp32 loses no more than rounding its inputs to 16 bits, and a sum in 16 bits does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ...support.narrowed import BF16, PRECISIONS

pytestmark = pytest.mark.contract

RANKS = 8


def test_a_wide_fold_loses_no_more_than_rounding_its_inputs_and_a_narrow_one_does() -> None:
    """Compares the mean gradient with fp64. The contributions have one size, so that the order matters most."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    inputs = [torch.rand(8, 512, generator=each, dtype=torch.float64) + 0.5 for each in generators]
    exact = torch.stack(inputs).sum(0)

    def error(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    def gradient(precision: str) -> Tensor:
        def program(transport: Transport) -> Tensor:
            model = nn.Linear(512, 8, bias=False)
            optimizer = ZeroOptimizer(
                model, stage=2, process_group=transport, mixed_precision=PRECISIONS[precision], divisor=1
            )
            (model.weight * inputs[transport.rank].to(BF16)).sum().backward()
            found = optimizer.full_grad(model.weight)
            assert found is not None
            return found

        return on_threads(RANKS, program)[0]

    one_rounding = error(torch.stack([each.to(BF16).double() for each in inputs]).sum(0))
    assert error(gradient("bf16")) <= one_rounding * (1 + 1e-4)  # fp32 adds 7 roundings of 2**-24; bf16's are of 2**-9
    assert error(gradient("bf16, added up in bf16")) > 2 * one_rounding
