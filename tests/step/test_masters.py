"""Master weights are rank 0's wide values, follow what is written into the model, and are saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives import solo
from zero.runtime.flat_states import MasterWeights

from ..dials.loops import DIALS, steps
from ..dials.record import config_with
from ..support.built_kernels import built_kernels, put_in
from ..support.errors import error_of
from ..support.machine import program as p
from ..support.machine.run import run
from ..support.narrowed import BF16
from ..support.plain import assert_same_bits, assert_same_states
from .narrow import build, step, zero

LOOPS: Any = DIALS[0].values


def test_masters_follow_what_is_written_into_the_model_by_kernels_too() -> None:
    """An element that keeps its rounded value keeps the full precision of its master weight. That they follow by
    torch's operators is a law (`laws/test_bits`)."""
    launched = list[str]()
    with put_in(built_kernels(launched.append)):
        config = config_with({"stage": 2, "world_size": 2, "precision": "bf16"})
        run(config, *steps(1), p.Write(None, 2), p.FullState(0, masters=True), *LOOPS["edits"])
    assert "follow" in launched


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_written_far_behind_and_a_zeros_sign_count(stage: int) -> None:
    """Weights are compared with their masters in blocks, of 65,536 elements on the CPU."""
    model = nn.Linear(512, 512)
    nn.init.zeros_(model.bias)
    optimizer = zero(model, solo(), stage, bucket_cap_mb=25.0)
    with optimizer.gathered(write=True):
        model.weight.data.view(-1)[:: 1 << 15] = 3.0
        model.weight.data.view(-1)[-1] = 5.0
        model.bias.data[3:40] = -0.0
    expected = torch.zeros(512)
    expected[3:40] = -0.0
    master = optimizer.full_master(model.weight).view(-1)
    assert [*master[:: 1 << 15].tolist(), master[-1]] == [3.0] * 8 + [5.0]
    assert_same_bits(optimizer.full_master(model.bias), expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_master_weight_that_is_nan_keeps_its_bits_beside_any_nan(dtype: torch.dtype) -> None:
    """A cast makes different NaNs at different places of a tensor."""
    first, kept = {BF16: 0x7F81, torch.float16: 0x7C01}[dtype], 0x7F812345
    params = torch.tensor([first, first - 0x8000, 0x7FFF, 0x3C00] * 4, dtype=torch.int16).view(dtype)
    masters = torch.full((16,), kept, dtype=torch.int32).view(torch.float32)
    MasterWeights(params, torch.float32, masters).sync_from_param()
    assert masters.view(torch.int32).tolist() == ([kept] * 3 + [params.float()[3].view(torch.int32)]) * 4


def test_a_dict_without_masters_keeps_them() -> None:
    model = build()
    optimizer = zero(model, solo(), 2)
    step(model, optimizer)
    saved = optimizer.state_dict()
    assert not torch.equal(saved["masters"][0], saved["masters"][0].to(BF16))
    for given, of_index in (
        ({"masters": {}}, lambda index, q: q.detach().float()),
        ({}, lambda index, q: saved["masters"][index]),
    ):
        optimizer.load_state_dict({**saved, **given})
        optimizer.load_state_dict({key: value for key, value in optimizer.state_dict().items() if key != "masters"})
        for index, q in enumerate(model.parameters()):
            assert_same_bits(optimizer.full_master(q), of_index(index, q))
    wide = torch.optim.AdamW([master.clone().requires_grad_() for master in saved["masters"].values()], lr=0.05)
    wide.load_state_dict(saved)  # torch's own class ignores the masters
    assert_same_states(wide.state_dict(), saved)
    wrong: list[tuple[Any, str]] = [
        ({**saved["masters"], 2: torch.zeros(3)}, "master weights of '1.weight' have shape (3,)"),
        *[(masters, "must hold tensors by the parameters' indices") for masters in ({"0": wide}, {0: "x"}, [1])],
    ]
    for masters, words in wrong:
        assert words in error_of(optimizer.load_state_dict, {**saved, "masters": masters})
