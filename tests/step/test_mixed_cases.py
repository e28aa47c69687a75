"""Mixed precision around the step: bytes, traffic, edits, checkpoints, casts of inputs and buffers, refusals."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer

from ..support.narrowed import BF16, FP16, FP32, PRECISIONS, Narrowed
from ..support.plain import assert_same_bits, assert_same_states
from ..support.programs import _BUILDING

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WIDTH = 64  # a multiple of the alignment: no padding


def build(seed: int = 0, count: int = 3) -> nn.Sequential:
    with _BUILDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def zero(model: nn.Module, transport: Transport, stage: int, **arguments: Any) -> ZeroOptimizer:
    arguments = {"lr": 0.05, "mixed_precision": MixedPrecision(BF16), "bucket_cap_mb": 0.01, **arguments}
    return ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, **arguments)


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x).float().square().mean().backward()


def plain_step(model: nn.Module, numbers: Narrowed, optimizer: torch.optim.Optimizer, seeds: list[int]) -> None:
    """Run a step of the plain loop, with each micro-batch's gradient added up in fp32."""
    total: dict[int, Tensor] = {}
    for seed in seeds:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
        model(x.to(BF16)).float().square().mean().backward()
        for index, p in enumerate(model.parameters()):
            if p.grad is not None:
                gradient = numbers.travelling(p.grad)
                total[index] = total[index] + gradient if index in total else gradient
        model.zero_grad()
    count = len(list(model.parameters()))
    numbers.show([total[index] / len(seeds) if index in total else None for index in range(count)])
    numbers.step(optimizer)


# -- memory and traffic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [FP32, BF16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@STAGES
def test_bytes_are_the_papers(stage: int, world_size: int, accumulate: torch.dtype) -> None:
    """Checks the bytes of an element, sharded as the stage says.

    It has 2 bytes for the parameter, 4 for its gradient (2 in 16 bits), and 12 for states and master weight. Buffers of
    a reduction have the reduce dtype.
    """
    precision, size = MixedPrecision(BF16, accumulate_dtype=accumulate), accumulate.itemsize

    def program(transport: Transport) -> None:
        model = build()
        psi = sum(p.numel() for p in model.parameters())
        optimizer = zero(model, transport, stage, mixed_precision=precision)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            gradients = optimizer.describe().bytes["gradients"]
            optimizer.step()
            gradients = max(gradients, optimizer.describe().bytes["gradients"])
        found = optimizer.describe()
        shard = psi // world_size
        if stage == 0:
            expected_gradients = size * psi + size * shard
        elif stage == 1:
            expected_gradients = 2 * psi + (4 * shard if accumulate is FP32 else 0)
        else:
            expected_gradients = size * shard
        expected = {
            "parameters": 2 * (psi if stage < 3 else shard),
            "gradients": expected_gradients,
            "optimizer": 12 * (psi if stage == 0 else shard),
        }
        slack = 64 * 3 * 4 * len(found.buckets)  # for the alignment of cuts, and a step count for each run
        for kind, nbytes in expected.items():
            held = gradients if kind == "gradients" else found.bytes[kind]
            assert nbytes - slack <= held <= nbytes + slack, (kind, nbytes, held)
            assert held == found.formula_bytes[kind], (kind, held)
        largest = max(bounds[-1] for bounds in (bucket.bounds for bucket in found.buckets))
        assert found.bytes["scratch_peak"] <= 3 * largest * 4

    on_threads(world_size, program)


@pytest.mark.parametrize(("backwards", "synchronised"), [(1, 1), (3, 3), (3, 1)])
@STAGES
@pytest.mark.by_default("2-1-1", "3-3-3")
def test_traffic_is_the_closed_form(stage: int, backwards: int, synchronised: int) -> None:
    """Contributions and parameters are sent in 16 bits.

    At stage 0 the means, which are read only after they are final, are sent once, in 32 bits.
    """

    def program(transport: Transport) -> tuple[int, int, int]:
        model = build()
        optimizer = zero(model, transport, stage)
        for _ in range(2):
            before = optimizer.traffic
            for number in range(backwards):
                if number < backwards - synchronised:
                    with optimizer.no_sync():
                        backward(model)
                else:
                    backward(model)
            optimizer.step()
            optimizer.zero_grad()
        spent = (optimizer.traffic - before).payload_sent
        psi = sum(p.numel() for p in model.parameters())
        return spent, optimizer.describe().formula_traffic_bytes(backwards, synchronised), psi

    results = on_threads(3, program)
    spent = sum(found[0] for found in results)
    assert spent == results[0][1]
    if stage < 3:
        means = {0: 4, 1: 2, 2: 2}[stage]
        assert spent == 2 * (2 * synchronised + means) * results[0][2]


@STAGES
@pytest.mark.by_default("2", "3")
def test_what_is_never_trained_has_no_master_weights(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = build()
        for part in model[1:]:
            part.requires_grad_(False)
        optimizer = zero(model, transport, stage)
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        found = optimizer.describe()
        trained = sum(p.numel() for p in model[0].parameters())
        share = trained if stage == 0 else trained // 2
        assert found.formula_bytes["optimizer"] == found.bytes["optimizer"]
        assert abs(found.bytes["optimizer"] - 12 * share) <= 64 * 12
        optimizer.consolidate_state_dict()
        if transport.rank == 0:
            assert sorted(optimizer.state_dict()["masters"]) == [0, 1]

    on_threads(2, program)


# -- masters -----------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.by_default("2", "3")
def test_masters_are_rank_0s_wide_values_and_can_be_read(stage: int) -> None:
    def program(transport: Transport) -> list[Tensor]:
        model = build(transport.rank)
        optimizer = zero(model, transport, stage)
        masters = [optimizer.full_master(p) for p in model.parameters()]
        with optimizer.gathered():
            for p, master in zip(model.parameters(), masters, strict=True):
                assert_same_bits(p, master.to(BF16))
        return masters

    for masters in on_threads(3, program):
        for master, value in zip(masters, build(0).parameters(), strict=True):
            assert_same_bits(master, value)


@STAGES
@pytest.mark.by_default("2", "3")
def test_masters_follow_what_is_written_into_the_model_element_by_element(stage: int) -> None:
    """An element that keeps its rounded value keeps the full precision of its master weight."""

    def write(p: Tensor) -> None:
        p.view(-1)[7:600] *= 1.5

    def program(transport: Transport) -> tuple[nn.Module, list[Tensor]]:
        model = build()
        optimizer = zero(model, transport, stage)
        backward(model, transport.rank)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), optimizer.gathered(write=True):
            write(model[0].weight)
        state = {key: value.float() for key, value in build(5).state_dict().items()}
        with optimizer.gathered(write=True):
            model[2].load_state_dict({"weight": state["2.weight"], "bias": state["2.bias"]})
        read = [optimizer.full_master(p) for p in model.parameters()]
        backward(model, transport.rank)
        optimizer.step()
        optimizer.close()
        return model, read

    plain = build()
    numbers = Narrowed(plain, MixedPrecision(BF16))
    optimizer = torch.optim.AdamW(numbers.updated, lr=0.05)
    plain_step(plain, numbers, optimizer, [0, 1])
    with torch.no_grad():
        write(plain[0].weight)
        plain[2].load_state_dict(build(5)[2].state_dict())
    followed = numbers.followed()
    plain_step(plain, numbers, optimizer, [0, 1])
    for model, read in on_threads(2, program):
        for ours, theirs in zip(read, followed, strict=True):
            assert_same_bits(ours, theirs)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits(p, q)


@STAGES
@pytest.mark.by_default("0", "3")
def test_what_is_written_far_behind_the_beginning_counts_too(stage: int) -> None:
    """Weights are compared with their masters in blocks, of 65,536 elements on the CPU."""

    def program(transport: Transport) -> Tensor:
        model = nn.Linear(512, 512)
        optimizer = zero(model, transport, stage, bucket_cap_mb=25.0)
        with optimizer.gathered(write=True):
            model.weight.data.view(-1)[:: 1 << 15] = 3.0
            model.weight.data.view(-1)[-1] = 5.0
        written = model.weight.detach().clone() if stage < 3 else None
        master = optimizer.full_master(model.weight)
        model(torch.ones(1, 512)).float().sum().backward()
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        optimizer.step()
        optimizer.close()
        assert_same_bits(model.weight, master.to(BF16))
        assert written is None or torch.equal(written, model.weight)
        return master

    for master in on_threads(2, program):
        assert master.view(-1)[:: 1 << 15].tolist() == [3.0] * 8
        assert master.view(-1)[-1] == 5.0


@STAGES
@pytest.mark.by_default("0", "3")
def test_a_zero_that_was_written_has_its_sign(stage: int) -> None:
    def program(transport: Transport) -> Tensor:
        model = build(count=1)
        nn.init.zeros_(model[0].bias)
        optimizer = zero(model, transport, stage)
        with optimizer.gathered(write=True):
            model[0].bias.data[3:40] = -0.0
        return optimizer.full_master(model[0].bias)

    expected = torch.zeros(WIDTH)
    expected[3:40] = -0.0
    for master in on_threads(2, program):
        assert_same_bits(master, expected)


@STAGES
@pytest.mark.by_default("0", "3")
def test_saved_masters_are_what_the_next_step_would_begin_with(stage: int) -> None:
    """They include values written since the last step."""

    def program(transport: Transport) -> Any:
        model = build()
        optimizer = zero(model, transport, stage)
        backward(model, transport.rank)
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.gathered(write=True):
            model[0].weight.data.view(-1)[7:600] *= 1.5
        optimizer.consolidate_state_dict()
        masters = [optimizer.full_master(p) for p in model.parameters()]
        with optimizer.gathered():
            weights = [p.detach().clone() for p in model.parameters()]
        return masters, weights, optimizer.state_dict()["masters"] if transport.rank == 0 else None

    masters, weights, saved = on_threads(2, program)[0]
    assert list(saved) == list(range(len(masters)))
    for index, (master, weight) in enumerate(zip(masters, weights, strict=True)):
        assert_same_bits(saved[index], master)
        assert_same_bits(saved[index].to(BF16), weight)


@STAGES
@pytest.mark.by_default("2", "3")
def test_reading_masters_changes_nothing(stage: int) -> None:
    """A write that is undone has no effect, even if masters were read and saved in between."""

    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, stage)
        backward(model, transport.rank)
        optimizer.step()
        optimizer.zero_grad()
        before = optimizer.full_master(model[0].weight)
        with optimizer.gathered(write=True):
            kept = model[0].weight.detach().clone()
            model[0].weight.data.mul_(1.5)
        assert_same_bits(optimizer.full_master(model[0].weight), (kept * 1.5).float())
        optimizer.consolidate_state_dict()
        with optimizer.gathered(write=True):
            model[0].weight.data.copy_(kept)
        assert_same_bits(optimizer.full_master(model[0].weight), before)

    on_threads(2, program)


class Averaging(nn.Module):
    """A module that keeps a mean of its inputs in fp32, as a batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.register_buffer("mean", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.training:
            self.mean.lerp_(y.detach().float().mean(0), 0.1)
        return y - self.mean.to(y.dtype)


@STAGES
@pytest.mark.by_default("2", "3")
def test_an_evaluation_between_steps_changes_nothing(stage: int) -> None:
    """It changes no weights, masters, moments and buffers, and no later step."""

    def train(transport: Transport, evaluates: bool) -> Any:
        model = Averaging()
        optimizer = zero(model, transport, stage)
        for step in range(3):
            backward(model, 10 * step + transport.rank)
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(2, WIDTH))
                model.train()
        optimizer.consolidate_state_dict()
        states = optimizer.state_dict() if transport.rank == 0 else None
        optimizer.close()
        return model.state_dict(), states

    with_one = on_threads(2, lambda transport: train(transport, True))
    without = on_threads(2, lambda transport: train(transport, False))
    for (ours, states), (theirs, expected) in zip(with_one, without, strict=True):
        for name, value in theirs.items():
            assert_same_bits(ours[name], value, name)
        if expected is not None:
            assert_same_states(states, expected)
            for index, master in expected["masters"].items():
                assert_same_bits(states["masters"][index], master, f"master weights of parameter {index}")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_group_that_is_added_later_has_masters_of_its_own_wide_values(stage: int) -> None:
    def program(transport: Transport) -> list[Tensor]:
        first, second = build(transport.rank), build(5 + transport.rank)
        optimizer = zero(list(first.parameters()), transport, stage)  # type: ignore[arg-type]
        first(torch.ones(1, WIDTH, dtype=BF16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": list(second.parameters())})
        masters = [optimizer.full_master(p) for p in second.parameters()]
        for p, master in zip(second.parameters(), masters, strict=True):
            assert_same_bits(p, master.to(BF16))
        return masters

    for masters in on_threads(2, program):
        for master, value in zip(masters, build(5).parameters(), strict=True):
            assert_same_bits(master, value)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize(("stage", "later"), [(0, 3), (1, 2), (2, 0), (3, 1)])
@pytest.mark.by_default("2-0-model first")
def test_training_goes_on_from_a_saved_dict_as_if_it_had_not_stopped(stage: int, later: int, order: str) -> None:
    def begin(transport: Transport) -> tuple[Any, Any]:
        model = build()
        optimizer = zero(model, transport, stage)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.consolidate_state_dict()
        saved = optimizer.state_dict() if transport.rank == 0 else None
        with optimizer.gathered():
            return {name: value.clone() for name, value in model.state_dict().items()}, saved

    (weights, saved), _ = on_threads(2, begin)

    def go_on(transport: Transport) -> nn.Module:
        model = build(7)
        if order == "model first":
            model.load_state_dict(weights)
        optimizer = zero(model, transport, later)
        optimizer.load_state_dict(copy.deepcopy(saved))
        if order == "optimizer first":
            with optimizer.gathered(write=True):
                model.load_state_dict(weights)
        backward(model, 1)
        optimizer.step()
        optimizer.close()
        return model

    plain = build()
    numbers = Narrowed(plain, MixedPrecision(BF16))
    optimizer = torch.optim.AdamW(numbers.updated, lr=0.05)
    plain_step(plain, numbers, optimizer, [0])
    assert_same_states(saved, optimizer.state_dict())
    for index, master in saved["masters"].items():
        assert_same_bits(master, numbers.updated[index])
    plain_step(plain, numbers, optimizer, [1])
    for model in on_threads(3, go_on):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits(p, q)


@STAGES
@pytest.mark.by_default("3")
def test_a_dict_without_masters_keeps_those_that_round_to_the_model(stage: int) -> None:
    """The dict is that of a run in fp32, whose model was there when the optimizer was built."""
    wide = build()
    trained = torch.optim.AdamW(wide.parameters(), lr=0.05)
    backward(wide)
    trained.step()

    def program(transport: Transport) -> tuple[list[Tensor], nn.Module]:
        model = build(7)
        model.load_state_dict(wide.state_dict())
        optimizer = zero(model, transport, stage)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        for parameter, value in zip(model.parameters(), wide.parameters(), strict=True):
            assert_same_bits(optimizer.full_master(parameter), value)
        with torch.no_grad(), optimizer.gathered(write=True):
            model[0].weight[3].mul_(2)
        masters = [optimizer.full_master(parameter) for parameter in model.parameters()]
        backward(model, 1)
        optimizer.step()
        optimizer.close()
        return masters, model

    plain = build()
    plain.load_state_dict(wide.state_dict())
    numbers = Narrowed(plain, MixedPrecision(BF16))
    optimizer = torch.optim.AdamW(numbers.updated, lr=0.05)
    optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    with torch.no_grad():
        plain[0].weight[3].mul_(2)
    followed = numbers.followed()
    plain_step(plain, numbers, optimizer, [1])
    for masters, model in on_threads(2, program):
        for master, value in zip(masters, followed, strict=True):
            assert_same_bits(master, value)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits(p, q)


def test_dicts_of_classes_without_masters_keep_them() -> None:
    model = build()
    groups = [
        {"params": list(model[0].named_parameters(prefix="0")), "optimizer_class": torch.optim.SGD},
        {"params": list(model[1:].named_parameters())},
    ]
    optimizer = zero(groups, solo(), 2, module=model)
    saved = optimizer.state_dict()
    masters = [optimizer.full_master(parameter) for parameter in model.parameters()]
    assert not torch.equal(masters[0], masters[0].to(BF16))
    optimizer.load_state_dict({name: {k: v for k, v in d.items() if k != "masters"} for name, d in saved.items()})
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert_same_bits(optimizer.full_master(parameter), master)


def test_a_dict_whose_masters_were_never_updated_leaves_them_to_the_model_and_a_plain_optimizer_takes_masters() -> None:
    model = build()
    optimizer = zero(model, solo(), 2)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "masters": {}})
    for p in model.parameters():
        assert_same_bits(optimizer.full_master(p), p.detach().float())
    optimizer.load_state_dict(saved)
    for index, p in enumerate(model.parameters()):
        assert_same_bits(optimizer.full_master(p), saved["masters"][index])
    wrong = {**saved, "masters": {**saved["masters"], 2: torch.zeros(3)}}
    with pytest.raises(ValueError, match=r"master weights of '1.weight' have shape \(3,\)"):
        optimizer.load_state_dict(wrong)
    wide = [master.clone().requires_grad_() for master in saved["masters"].values()]
    plain = torch.optim.AdamW(wide, lr=0.05)
    plain.load_state_dict(saved)
    assert_same_states(plain.state_dict(), saved)


def test_a_dict_of_weights_that_were_never_updated_says_so() -> None:
    """Master weights of later steps would otherwise stay where they round to the weights of then."""
    model = build()
    optimizer = zero(model, solo(), 1)
    before = optimizer.state_dict()
    weights = copy.deepcopy(model.state_dict())
    optimizer.load_state_dict({**before, "masters": {}})
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 1e-9
    backward(model)
    optimizer.step()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for p in model.parameters():
        assert_same_bits(optimizer.full_master(p), p.detach().float())


@STAGES
def test_a_full_gradient_is_the_wide_mean_and_p_grad_is_a_placeholder(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, stage)
        for turn in range(2):
            backward(model, 2 * turn + transport.rank)
        grad = model[0].weight.grad
        assert grad is not None
        with pytest.raises(RuntimeError, match="full_grad"):
            grad.sum()
        whole = optimizer.full_grad(model[0].weight)
        assert whole is not None
        plain = build()
        numbers = Narrowed(plain, MixedPrecision(BF16))
        plain_step(plain, numbers, torch.optim.SGD(numbers.updated, lr=0.0), [0, 1, 2, 3])
        assert numbers.held[0].grad is not None
        assert_same_bits(whole, numbers.held[0].grad * 2)  # divided by 2 ranks there, by 4 micro-batches here

    on_threads(2, program)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_one_rank_used_and_all_zeroed_is_zero_in_every_slice(stage: int) -> None:
    """Not -0.0, as for a parameter that no rank used."""

    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, stage)
        loss = model[0](torch.ones(1, WIDTH, dtype=BF16)).float().square().mean()
        (loss if transport.rank else loss + model[2](torch.ones(1, WIDTH, dtype=BF16)).float().mean()).backward()
        optimizer.zero_grad(set_to_none=False)
        model[0](torch.ones(1, WIDTH, dtype=BF16)).float().square().mean().backward()
        for part, zero_everywhere in ((model[0], False), (model[2], True)):
            whole = optimizer.full_grad(part.weight)
            assert whole is not None
            assert bool((whole == 0).all()) is zero_everywhere
            if zero_everywhere:
                assert_same_bits(whole, torch.zeros(WIDTH, WIDTH))
        assert optimizer.full_grad(model[1].weight) is None

    on_threads(2, program)


# -- casts of inputs and buffers ---------------------------------------------------------------------------------------


class Fed(nn.Module):
    """A model that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.apart = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, more: Any) -> Tensor:
        self.seen = [x.dtype, more["pair"][0].dtype, more["tokens"].dtype]
        return (x * self.weight * self.apart).sum()


@pytest.mark.parametrize("casts", [True, False])
@STAGES
def test_inputs_unlisted_parameters_and_asked_for_buffers_are_cast(stage: int, casts: bool) -> None:
    precision = MixedPrecision(BF16, buffer_dtype=BF16 if casts else None, cast_forward_inputs=casts)

    def program(transport: Transport) -> None:
        model = Fed()
        optimizer = ZeroOptimizer(
            [model.weight],
            torch.optim.SGD,
            lr=0.1,
            stage=stage,
            module=model,
            process_group=transport,
            mixed_precision=precision,
        )
        x = torch.ones(2, dtype=FP32 if casts else BF16)
        more = {"pair": (torch.ones(2, dtype=FP16), "text"), "tokens": torch.ones(2, dtype=torch.int64)}
        model(x, more=more).backward()
        assert model.seen == [BF16, BF16 if casts else FP16, torch.int64]
        assert more["pair"][0].dtype is FP16  # the caller's own tensors are unchanged
        assert (model.weight.dtype, model.apart.dtype) == (BF16, BF16)
        assert (model.mean.dtype, model.count.dtype) == (BF16 if casts else FP32, torch.int64)
        copied = copy.deepcopy(build())
        del copied
        optimizer.step()
        optimizer.close()
        assert model.weight.dtype is BF16
        model(x, more=more)
        assert model.seen[0] is x.dtype  # the model is plain again

    on_threads(2, program)


def test_a_copy_of_the_model_computes_in_the_same_dtype() -> None:
    model = build()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0, mixed_precision=MixedPrecision(BF16))
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert_same_bits(average(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH)))
    optimizer.close()


@pytest.mark.parametrize("ends", ["discarded", "superseded"])
def test_what_an_optimizer_did_to_the_inputs_ends_with_it(ends: str) -> None:
    """For a notebook whose cell is run again."""
    model = build()
    first = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0, mixed_precision=MixedPrecision(BF16))
    if ends == "discarded":
        del first
        gc.collect()
        model.float()
        found = model(torch.ones(1, WIDTH))
    else:
        model.float()
        second = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0)
        found = model(torch.ones(1, WIDTH))
        second.close()
    assert found.dtype is FP32
    with torch.no_grad():
        assert_same_bits(found, nn.Sequential.forward(model, torch.ones(1, WIDTH)))


def test_an_older_optimizer_that_is_closed_and_one_beside_leave_the_cast_of_another() -> None:
    model = build()
    first = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0, mixed_precision=MixedPrecision(BF16))
    second = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0, mixed_precision=MixedPrecision(BF16))
    with pytest.warns(RuntimeWarning, match="a newer ZeroOptimizer took over"):
        first.close()  # it no longer owns the memory
    assert model(torch.ones(1, WIDTH)).dtype is BF16
    second.close()
    half = ZeroOptimizer(
        model[0].parameters(), torch.optim.SGD, lr=0.1, stage=0, module=model, mixed_precision=MixedPrecision(BF16)
    )
    other = ZeroOptimizer(model[1].parameters(), torch.optim.SGD, lr=0.1, stage=0, module=model)
    assert model(torch.ones(1, WIDTH)).dtype is BF16
    other.close()
    assert model(torch.ones(1, WIDTH)).dtype is BF16
    half.close()


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Item:
    x: Tensor
    count: int = 0


def test_inputs_are_cast_in_every_container() -> None:
    seen: list[Any] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, *args: Any) -> Tensor:
            seen.extend(args)
            return self.weight.sum()

    model = Keeps()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=0, mixed_precision=MixedPrecision(BF16))
    x = torch.ones(2)
    model(Pair(x, "a"), Item(x, 3), OrderedDict(x=x), UserDict({"x": x}), [x, (x,)])
    pair, item, ordered, user, listed = seen
    assert [type(value) for value in seen] == [Pair, Item, OrderedDict, UserDict, list]
    assert (pair.name, item.count) == ("a", 3)
    found = (pair.x, item.x, ordered["x"], user["x"], listed[0], listed[1][0])
    assert {value.dtype for value in found} == {BF16}
    assert x.dtype is FP32
    optimizer.close()


@STAGES
def test_a_class_that_begins_with_state_needs_no_masters_for_what_is_frozen(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = build()
        model[0].requires_grad_(False)
        optimizer = ZeroOptimizer(
            model,
            torch.optim.Adagrad,
            lr=0.1,
            stage=stage,
            process_group=transport,
            mixed_precision=MixedPrecision(BF16),
        )
        for number in range(2):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        masters = [bucket.states.master for bucket in optimizer._storage.buckets]
        frozen = [not bucket.trainable for bucket in optimizer.describe().buckets]
        assert [master is not None and not master.exists for master in masters] == frozen
        assert any(frozen)
        model[0].requires_grad_(True)
        backward(model)
        optimizer.step()  # with the state of the first step
        assert all(master is not None and master.exists for master in masters)

    on_threads(2, program)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_saved_masters_that_cannot_be() -> None:
    model = build()
    optimizer = ZeroOptimizer(model, stage=0, lr=0.1, mixed_precision=MixedPrecision(BF16))
    backward(model)
    optimizer.step()
    saved = optimizer.state_dict()
    for masters in ({"0": saved["masters"][0]}, {0: "x"}, [1]):
        with pytest.raises(ValueError, match="'masters' of a state dict must hold tensors by the parameters' indices"):
            optimizer.load_state_dict({**saved, "masters": masters})
    optimizer.close()


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(TypeError, match="param_dtype must be one of"):
        MixedPrecision(torch.float64)
    with pytest.raises(TypeError, match="reduce_dtype must be one of"):
        MixedPrecision(BF16, reduce_dtype=torch.int8)
    for param_dtype in (FP32, FP16):  # with two 16-bit dtypes each part would be rounded twice
        with pytest.raises(
            ValueError, match=r"accumulate_dtype torch.bfloat16 must be torch\.\w+, in which .* or wider"
        ):
            MixedPrecision(param_dtype, accumulate_dtype=BF16)
    with pytest.raises(TypeError, match=r"mixed_precision must be a zero.MixedPrecision, not torch.bfloat16"):
        ZeroOptimizer(build(), mixed_precision=BF16)  # type: ignore[arg-type]


def test_ranks_with_different_precisions_are_told() -> None:
    def program(transport: Transport) -> str:
        precision = MixedPrecision(BF16 if transport.rank else FP16)
        with pytest.raises(ValueError, match="different models or optimizers") as caught:
            zero(build(), transport, 2, mixed_precision=precision)
        return str(caught.value)

    first, second = on_threads(2, program)
    assert first == second
    assert "param_dtype" in first


def test_moving_a_weight_to_another_dtype_afterwards_is_an_error_that_names_it() -> None:
    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, 1)
        model.float()
        with pytest.raises(RuntimeError, match=r"'2.bias' is now torch.float32"):
            optimizer.step()

    on_threads(1, program)


# -- why sums are in fp32 ----------------------------------------------------------------------------------------------


def test_a_wide_fold_loses_no_more_than_rounding_its_inputs_and_a_narrow_one_does() -> None:
    """Compares the mean gradient at W = 8 with fp64. The contributions have one size, so that the order matters
    most."""

    def error(precision: str) -> float:
        def program(transport: Transport) -> Tensor:
            model = nn.Linear(512, 8, bias=False)
            optimizer = zero(model, transport, 2, mixed_precision=PRECISIONS[precision], divisor=1)
            generator = torch.Generator().manual_seed(transport.rank)
            wide = torch.rand(8, 512, generator=generator, dtype=torch.float64) + 0.5
            (model.weight * wide.to(BF16)).sum().backward()
            gradient = optimizer.full_grad(model.weight)
            assert gradient is not None
            inputs.append(wide)
            return gradient

        inputs: list[Tensor] = []
        gradient = on_threads(8, program)[0].double()
        exact = torch.stack(inputs).sum(0)
        return float((gradient - exact).norm() / exact.norm())

    def rounding() -> float:
        parts = [
            torch.rand(8, 512, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) + 0.5
            for rank in range(8)
        ]
        exact = torch.stack(parts).sum(0)
        return float((torch.stack([part.to(BF16).double() for part in parts]).sum(0) - exact).norm() / exact.norm())

    one_rounding = rounding()
    wide, narrow = error("bf16"), error("bf16, added up in bf16")
    assert wide <= one_rounding * (1 + 1e-4)  # fp32 adds 7 roundings of 2**-24; bf16's are of 2**-9
    assert narrow > 2 * one_rounding
