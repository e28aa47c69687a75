"""Master weights are rank 0's wide values, follow what is written into the model, and are saved and loaded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero.runtime.flat_states import MasterWeights

from ..support.built_kernels import built_kernels, put_in
from ..support.errors import error_of
from ..support.narrowed import BF16
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from .narrow import build, plain_loop, step, step_plainly, zero


@pytest.mark.parametrize(("stage", "with_kernels"), [(2, False), (2, True), (3, False)])
def test_masters_follow_what_is_written_into_the_model_element_by_element(stage: int, with_kernels: bool) -> None:
    """An element that keeps its rounded value keeps the full precision of its master weight."""

    def write(p: Tensor) -> None:
        with torch.no_grad():
            p.view(-1)[7:600] *= 1.5

    def program(transport: Transport) -> tuple[nn.Module, list[Tensor]]:
        model = build()
        optimizer = zero(model, transport, stage)
        step(model, optimizer, transport.rank)
        before = optimizer.full_master(model[0].weight)
        with optimizer.gathered(write=True):
            kept = model[0].weight.detach().clone()
            model[0].weight.data.mul_(1.5)
        assert_same_bits(optimizer.full_master(model[0].weight), (kept * 1.5).float())
        optimizer.consolidate_state_dict()
        with optimizer.gathered(write=True):
            model[0].weight.data.copy_(kept)
        assert_same_bits(optimizer.full_master(model[0].weight), before, "reading changed something")
        with optimizer.gathered(write=True):
            write(model[0].weight)
            model[2].load_state_dict({key: value.float() for key, value in build(5)[2].state_dict().items()})
        read = [optimizer.full_master(p) for p in model.parameters()]
        step(model, optimizer, transport.rank)
        optimizer.close()
        return model, read

    plain: Any = plain_loop()
    step_plainly(plain, 0, 1)
    write(plain.model[0].weight)
    plain.model[2].load_state_dict(build(5)[2].state_dict())
    followed = plain.numbers.followed()
    step_plainly(plain, 0, 1)
    with put_in(built_kernels()) if with_kernels else nullcontext():
        results = on_threads(2, program)
    for model, read in results:
        for ours, theirs in zip(read, followed, strict=True):
            assert_same_bits(ours, theirs)
        assert_same_model(model, plain.model)


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
        ({"masters": {}}, lambda index, p: p.detach().float()),
        ({}, lambda index, p: saved["masters"][index]),
    ):
        optimizer.load_state_dict({**saved, **given})
        optimizer.load_state_dict({key: value for key, value in optimizer.state_dict().items() if key != "masters"})
        for index, p in enumerate(model.parameters()):
            assert_same_bits(optimizer.full_master(p), of_index(index, p))
    wide = torch.optim.AdamW([master.clone().requires_grad_() for master in saved["masters"].values()], lr=0.05)
    wide.load_state_dict(saved)  # torch's own class ignores the masters
    assert_same_states(wide.state_dict(), saved)
    wrong: list[tuple[Any, str]] = [
        ({**saved["masters"], 2: torch.zeros(3)}, "master weights of '1.weight' have shape (3,)"),
        *[(masters, "must hold tensors by the parameters' indices") for masters in ({"0": wide}, {0: "x"}, [1])],
    ]
    for masters, words in wrong:
        assert words in error_of(optimizer.load_state_dict, {**saved, "masters": masters})
