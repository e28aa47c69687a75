"""Master weights are rank 0's wide values, follow what is written into the model, and are saved and loaded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer
from zero.runtime.flat_states import MasterWeights

from ..support.built_kernels import built_kernels, put_in
from ..support.narrowed import BF16
from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from ..support.rows import rows
from ..support.sides import AsPlain, OnRank, Side
from .narrow import WIDTH, build, loss_of, plain_loop, step, step_plainly, zero


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_masters_are_rank_0s_wide_values_and_can_be_read(stage: int) -> None:
    """Those of a group that is added later, too."""

    def program(transport: Transport) -> list[Tensor]:
        model = build(transport.rank)
        listed = list(model[:2].parameters())
        optimizer = zero(model if stage == 3 else listed, transport, stage)
        if stage < 3:
            optimizer.add_param_group({"params": list(model[2].parameters())})
        masters = [optimizer.full_master(p) for p in model.parameters()]
        with optimizer.gathered():
            for p, master in zip(model.parameters(), masters, strict=True):
                assert_same_bits(p, master.to(BF16))
        return masters

    for masters in on_threads(3, program):
        for master, value in zip(masters, build(0).parameters(), strict=True):
            assert_same_bits(master, value)


F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype"),
    rows([(0, 3, F64), (1, 1, F64), (2, 2, F64), (3, 1, F64), (1, 2, F32)], [(1, 2, F64), (3, 2, F64), (3, 1, F32)]),
)
def test_a_weight_that_is_listed_later_has_a_master_of_its_dtype_with_the_digits_of_its_cast(
    stage: int, ranks: int, dtype: torch.dtype
) -> None:
    """As it was cast with the model. Its states, too, are those of a weight in its own dtype."""

    def made() -> nn.Sequential:
        return build(0, 2).to(dtype)

    def loop(side: Side) -> dict[str, Any]:
        for number in range(7):  # RAdam's own steps begin with the sixth
            side.train(lambda model, rank, number=number: loss_of(model, 10 * number + rank))  # type: ignore[misc]
            side.step()
            side.clear()
        if isinstance(side.optimizer, ZeroOptimizer):
            side.optimizer.consolidate_state_dict(to=None)
        found: dict[str, Any] = side.optimizer.state_dict()
        return found

    model, mixed = made(), MixedPrecision(BF16)
    for p in model[1].parameters():
        p.data = p.to(BF16).to(dtype)
    plain = AsPlain(model, lambda masters: torch.optim.RAdam(masters, lr=0.05), ranks, mixed)
    expected = loop(plain)

    def program(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        ours = made()
        given = {"module": ours, "stage": stage, "process_group": transport, "mixed_precision": mixed, "lr": 0.05}
        optimizer = ZeroOptimizer(list(ours[0].parameters()), torch.optim.RAdam, **given)
        optimizer.add_param_group({"params": list(ours[1].parameters())})
        found = loop(OnRank(ours, optimizer))
        optimizer.close()
        return ours, found

    for ours, found in on_threads(ranks, program):
        assert_same_model(ours, model)
        assert_same_states(found, expected)
        assert {master.dtype for master in found["masters"].values()} == {dtype}
        for index, master in enumerate(plain.numbers.updated):
            assert_same_bits(found["masters"][index], master)


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
        state = {key: value.float() for key, value in build(5)[2].state_dict().items()}
        with optimizer.gathered(write=True):
            model[2].load_state_dict(state)
        read = [optimizer.full_master(p) for p in model.parameters()]
        optimizer.consolidate_state_dict(None)
        for index, master in optimizer.state_dict()["masters"].items():
            assert_same_bits(master, read[index], "what is saved is that with which the next step begins")
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
    assert master[:: 1 << 15].tolist() == [3.0] * 8
    assert master[-1] == 5.0
    assert_same_bits(optimizer.full_master(model.bias), expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_master_weight_that_is_nan_keeps_its_bits_beside_any_nan(dtype: torch.dtype) -> None:
    """A cast makes different NaNs at different places of a tensor."""
    first, kept = {BF16: 0x7F81, torch.float16: 0x7C01}[dtype], 0x7F812345
    params = torch.tensor([first, first - 0x8000, 0x7FFF, 0x3C00] * 4, dtype=torch.int16).view(dtype)
    masters = torch.full((16,), kept, dtype=torch.int32).view(torch.float32)
    MasterWeights(params, torch.float32, masters).sync_from_param()
    assert masters.view(torch.int32).tolist() == ([kept] * 3 + [params.float()[3].view(torch.int32)]) * 4


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_never_trained_has_no_master_weights(stage: int) -> None:
    """Nor does it need any for a class that begins with state; it has them from its first step on."""

    def program(transport: Transport) -> None:
        model = build()
        model[0].requires_grad_(False)
        precision = MixedPrecision(BF16)
        optimizer = ZeroOptimizer(
            model, torch.optim.Adagrad, lr=0.1, stage=stage, process_group=transport, mixed_precision=precision
        )
        for seed in range(2):
            step(model, optimizer, seed)
        found = optimizer.describe()
        assert found.formula_bytes["optimizer"] == found.bytes["optimizer"]
        trained, begun = (sum(p.numel() for p in part.parameters()) for part in (model[1:], model[0]))
        assert abs(found.bytes["optimizer"] - (8 * trained + 4 * begun) // 2) <= 64 * 12
        masters = [bucket.states.master for bucket in parts_of(optimizer).storage.buckets]
        frozen = [not bucket.trainable for bucket in found.buckets]
        assert [master is not None and not master.exists for master in masters] == frozen
        assert any(frozen)
        optimizer.consolidate_state_dict(None)
        assert sorted(optimizer.state_dict()["masters"]) == [2, 3, 4, 5]
        model[0].requires_grad_(True)
        step(model, optimizer)
        assert all(master is not None and master.exists for master in masters)

    on_threads(2, program)


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
        ({**saved["masters"], 2: torch.zeros(3)}, r"master weights of '1.weight' have shape \(3,\)"),
        *[(masters, "must hold tensors by the parameters' indices") for masters in ({"0": wide}, {0: "x"}, [1])],
    ]
    for masters, words in wrong:
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict({**saved, "masters": masters})


@pytest.mark.parametrize("stage", rows([0, 1], [2, 3]))
def test_a_full_gradient_is_the_wide_mean_and_zero_where_all_zeroed(stage: int) -> None:
    """Not -0.0, as for a parameter that no rank used."""

    def program(transport: Transport) -> None:
        model, plain = build(), plain_loop()
        optimizer = zero(model, transport, stage)
        for turn in range(2):
            loss_of(model, 2 * turn + transport.rank).backward()  # type: ignore[no-untyped-call]
        assert model[0].weight.grad is not None
        with pytest.raises(RuntimeError, match="full_grad"):
            model[0].weight.grad.sum()
        for seed in range(4):
            plain.backward(0, loss_of(plain.model, seed).backward)
        plain.divisor = 2
        plain.settle()
        found, expected = optimizer.full_grad(model[0].weight), plain.held[0].grad
        assert found is not None
        assert expected is not None
        assert_same_bits(found, expected)
        if stage == 3:  # there all ranks use the same parameters
            return
        optimizer.zero_grad()
        ones = torch.ones(1, WIDTH, dtype=BF16)
        loss = model[0](ones).float().square().mean()
        (loss if transport.rank else loss + model[2](ones).float().mean()).backward()
        optimizer.zero_grad(set_to_none=False)
        model[0](ones).float().square().mean().backward()
        used, zeroed = (optimizer.full_grad(part.weight) for part in (model[0], model[2]))
        assert used is not None
        assert used.any()
        assert zeroed is not None
        assert_same_bits(zeroed, torch.zeros(WIDTH, WIDTH))
        assert optimizer.full_grad(model[1].weight) is None

    on_threads(2, program)
