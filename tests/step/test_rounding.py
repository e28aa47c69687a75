"""Weights and states in bf16 with stochastic rounding: the plain loop's bits, bytes, refusals, and runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import zero
from collectives import Transport, on_threads, solo
from zero import MixedPrecision, Offload, ShardedAverage, StochasticRounding, ZeroOptimizer

from ..support.machine import program as machine
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.models import build, odd_batches, odd_loss, seeded
from ..support.narrowed import BF16, PRECISIONS
from ..support.offloaded import copied_from_the_host
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from ..support.programs import Program, Round, Step, check
from ..support.rows import rows

ROUNDING = StochasticRounding(7)
CLIPPED = (Step(clips=((0.1, 2.0),)), Step(), Step((Round(sync=False), Round(), Round())), Step())
FROZEN = (Step(), Step(toggle=("frozen", "first.weight")), Step(toggle=("last.bias",)), Step())
SCALED = (Step(clips=((0.1, 2.0),)), Step(overflow=(0, 0)), Step(clips=((0.1, 2.0),)), Step())
STATES = (Step(), Step(reset=("first.weight", "turned")), Step(reset=None), Step())

P = PRECISIONS
ROWS: dict[str, Program] = {
    "3-W4": Program(4, 3, "sgd momentum", dtype=BF16, rounding=ROUNDING, sharding_factor=2, steps=CLIPPED),
    "made in the constructor": Program(3, 1, "adagrad", dtype=BF16, rounding=ROUNDING, steps=STATES),
    "sums in fp32": Program(3, 3, "adamw", precision=P["bf16"], rounding=ROUNDING, steps=CLIPPED),
}


@pytest.mark.parametrize("row", ROWS)
def test_training_is_that_of_the_plain_loop(row: str) -> None:
    check(ROWS[row])


@pytest.mark.parametrize("whole", [False, True])
def test_a_state_that_an_option_adds_later_is_rounded_wherever_it_lies(whole: bool) -> None:
    """The shapes of a number and of a parameter with one owner do not tell which states are as large as they."""
    setting = machine.Setting(stage=2, world_size=2, bucket_cap_mb=1e-6)  # a bucket for each parameter
    parts = (Part("sequence", of=(Part("scalar"),)),)
    config = machine.Config(setting, parts, optimizer="sgd", precision="bf16", wholes=(whole,), rounded=True)
    steps = [each for n in (1, 2) for each in (machine.Backward(n), machine.Step(), machine.ZeroGrad())]
    run(config, *steps, machine.Change(0, "momentum", 0.5), *steps)


@pytest.mark.parametrize("offload", [Offload("cpu", parameters="cpu"), Offload("cpu", parameters="cpu", step="cpu")])
def test_parameters_on_the_host_are_rounded_to_the_same_bits(offload: Offload) -> None:
    with copied_from_the_host():
        check(Program(2, 3, "adamw", dtype=BF16, rounding=ROUNDING, offload=offload, steps=CLIPPED))


def steps_of(side: nn.Module, rank: int, world_size: int, steps: range, step: Any) -> None:
    """Take steps over six micro-batches each, of which a rank has its share; ``step`` steps, and clears gradients."""
    for number in steps:
        for batch in odd_batches(6, number, extra=False)[rank::world_size]:
            odd_loss(side, batch).backward()
        step()


def plain_training(steps: range, begin: Any = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train in a plain loop. ``begin``: called with the model and the optimizer before."""
    model = build(0, BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)

    def step() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(6)
        ROUNDING.step(optimizer)
        optimizer.zero_grad()

    if begin is not None:
        begin(model, optimizer)
    steps_of(model, 0, 1, steps, step)
    return model, optimizer


def built(transport: Transport, stage: int, **settings: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model = build(transport.rank, BF16)
    given = {"rounding": ROUNDING, "lr": 1e-2, "bucket_cap_mb": 0.002, **settings}
    return model, ZeroOptimizer(model, stage=stage, process_group=transport, divisor=6, **given)


def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range) -> None:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    steps_of(model, optimizer.rank, optimizer.world_size, steps, step)


def whole(model: nn.Module, optimizer: ZeroOptimizer) -> tuple[nn.Module, dict[str, Any]]:
    optimizer.consolidate_state_dict(None)
    states = optimizer.state_dict()
    optimizer.close()
    return model, states


def test_a_training_goes_on_at_another_topology_and_in_the_plain_loop(tmp_path: Path) -> None:
    """From checkpoints and from dicts, which have the number of steps."""
    plain, undisturbed = plain_training(range(4))

    def first(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        model, optimizer = built(transport, 3)
        train(model, optimizer, range(2))
        zero.save(tmp_path / "saved", optimizer)
        return whole(model, optimizer)

    def second(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        model, optimizer = built(transport, 1)
        zero.load(tmp_path / "saved", optimizer)
        train(model, optimizer, range(2, 3))
        halfway = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        train(model, optimizer, range(5, 6))  # steps that are taken back
        with optimizer.gathered(write=True):
            model.load_state_dict(halfway)
        optimizer.load_state_dict(states)
        train(model, optimizer, range(3, 4))
        return whole(model, optimizer)

    before, states = on_threads(2, first)[0]
    assert states["param_groups"][0]["rounding_steps"] == 2
    for model, found in on_threads(3, second):
        assert_same_model(model, plain)
        assert_same_states(found, undisturbed.state_dict())
        assert found["param_groups"][0]["rounding_steps"] == 4

    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(before.state_dict())
        optimizer.load_state_dict(states)

    assert_same_model(plain_training(range(2, 4), begin)[0], plain)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_rank_holds_two_bytes_for_each_weight_and_each_state(mixed: bool) -> None:
    """To the byte, as the formulas say. With sums in fp32, gradients have four."""
    elements, ranks = 3 * 64 * 64, 4

    def program(transport: Transport, stage: int) -> Any:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).to(None if mixed else BF16)
        precision = {"mixed_precision": MixedPrecision(BF16)} if mixed else {}
        optimizer = ZeroOptimizer(
            model, stage=stage, process_group=transport, rounding=ROUNDING, bucket_cap_mb=0.01, **precision
        )
        for _ in range(2):
            model(torch.ones(2, 64, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        told = optimizer.describe()
        optimizer.close()
        return told

    for stage in range(4):
        for told in on_threads(ranks, lambda transport, stage=stage: program(transport, stage)):
            for kind in ("parameters", "gradients", "optimizer"):
                assert told.bytes[kind] == told.formula_bytes[kind]
            share = 1 if stage == 0 else ranks
            counts = told.bytes["optimizer"] - 2 * 2 * elements // share
            assert counts in range(4, 4 * 4, 4)  # a step count of each run
            assert told.bytes["parameters"] == 2 * elements // (ranks if stage == 3 else 1)
            if stage in (2, 3):
                assert told.bytes["gradients"] == (4 if mixed else 2) * elements // ranks


def test_a_step_that_fails_leaves_weights_and_states_in_16_bits() -> None:
    class Fails(torch.optim.SGD):
        """Fails in its third step, after it has changed the weights."""

        count = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if self.param_groups[0]["lr"] == 0.5:
                raise ArithmeticError("as asked")

    model = build(0, BF16)
    optimizer = ZeroOptimizer(model, Fails, process_group=solo(), rounding=ROUNDING, lr=0.1, momentum=0.9, divisor=6)
    train(model, optimizer, range(1))
    kept = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(Exception, match="as asked"):
        train(model, optimizer, range(1, 2))
    assert optimizer.param_groups[0]["rounding_steps"] == 1
    for p, before in zip(model.parameters(), kept, strict=True):
        assert_same_bits(p, before)
    assert optimizer.state[model.get_parameter("first.weight")]["momentum_buffer"].dtype is BF16


def test_the_plain_step_leaves_all_as_it_was_if_the_class_fails() -> None:
    model, optimizer = plain_training(range(1))
    kept = [p.detach().clone() for p in model.parameters()]
    states = optimizer.state_dict()
    odd_loss(model, odd_batches(1)[0]).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        ROUNDING.step(optimizer)
    assert optimizer.param_groups[0]["rounding_steps"] == 1
    for p, before, gradient in zip(model.parameters(), kept, gradients, strict=True):
        assert_same_bits(p, before)
        if gradient is not None:
            assert_same_bits(p.grad, gradient)
    for index, state in optimizer.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name] is states["state"][index][name]
            assert state[name].dtype is BF16


def net() -> nn.Module:
    return seeded(0, lambda: nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 5)).bfloat16())


def of_two_classes(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters for AdamW, and those for Muon."""
    return [[p for p in model.parameters() if (p.dim() == 2) is matrices] for matrices in (False, True)]


def net_loss(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(torch.full((3, 7), 0.1 * number + 0.5, dtype=BF16)).square().sum()
    return loss


def test_with_several_classes_parameters_are_numbered_over_all_groups() -> None:
    """In the plain loop each class has an optimizer."""
    plain = net()
    rest, matrices = of_two_classes(plain)
    both = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.Muon(matrices, lr=1e-2)]
    for step in range(3):
        for rank in range(2):
            net_loss(plain, 2 * step + rank).backward()
        for optimizer in both:
            ROUNDING.step(optimizer, among=[*rest, *matrices])
            optimizer.zero_grad()

    def program(transport: Transport) -> nn.Module:
        model = net()
        rest, matrices = of_two_classes(model)
        muon = {"params": matrices, "optimizer_class": torch.optim.Muon, "partition": "parameter", "lr": 1e-2}
        given = {"module": model, "stage": 3, "process_group": transport, "divisor": 1, "rounding": ROUNDING}
        optimizer = ZeroOptimizer([{"params": rest}, muon], torch.optim.AdamW, lr=1e-2, **given)
        for step in range(3):
            net_loss(model, 2 * step + transport.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model

    for model in on_threads(2, program):
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", rows([1, 3], [0, 2]))
def test_a_class_makes_the_states_of_a_later_group_from_copies_in_fp32(stage: int) -> None:
    """Adagrad's 0.1 is no number of bf16. So it is when states are reset."""
    arguments: dict[str, Any] = {"lr": 0.1, "initial_accumulator_value": 0.1}

    def trained(model: nn.Module, optimizer: Any, rank: int, ranks: int) -> dict[str, Any]:
        optimizer.add_param_group({"params": list(model[2].parameters())})
        for step in range(3):
            for number in (rank,) if ranks == 1 else range(2):
                net_loss(model, 2 * step + number).backward()
            optimizer.step() if ranks == 1 else ROUNDING.step(optimizer)
            optimizer.zero_grad()
            if step == 1 and ranks == 1:
                optimizer.reset_states([model[0].weight])
            elif step == 1:
                del optimizer.state[model[0].weight]
        if ranks == 1:
            optimizer.consolidate_state_dict(to=None)
        found: dict[str, Any] = optimizer.state_dict()
        return found

    plain = net()
    adagrad = torch.optim.Adagrad([*plain[0].parameters(), *plain[1].parameters()], **arguments)
    expected = trained(plain, adagrad, 0, 2)

    def program(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        model = net()
        given = {"module": model, "stage": stage, "process_group": transport, "divisor": 1, "rounding": ROUNDING}
        listed = [*model[0].parameters(), *model[1].parameters()]
        optimizer = ZeroOptimizer(listed, torch.optim.Adagrad, **arguments, **given)
        found = trained(model, optimizer, transport.rank, 1)
        optimizer.close()
        return model, found

    for model, found in on_threads(2, program):
        assert_same_model(model, plain)
        assert_same_states(found, expected)


def test_the_plain_step_needs_a_used_parameter_with_a_dimension() -> None:
    """Of a single number, a step count has its parameter's shape, too."""
    scale, matrix = nn.Parameter(torch.ones((), dtype=BF16)), nn.Parameter(torch.ones(2, 2, dtype=BF16))
    optimizer = torch.optim.AdamW([scale, matrix])
    scale.square().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="every parameter that was used has 0 dimensions"):
        ROUNDING.step(optimizer)
    assert not optimizer.state
    (matrix * scale).sum().backward()
    for _ in range(2):
        ROUNDING.step(optimizer)
        matrix.grad = None
    assert optimizer.state[scale]["exp_avg"].dtype is BF16


def test_a_dict_without_a_number_of_steps_begins_at_the_first() -> None:
    model, optimizer = built(solo(), 2)
    train(model, optimizer, range(2))
    states = optimizer.state_dict()
    del states["param_groups"][0]["rounding_steps"]
    optimizer.load_state_dict(states)
    assert "rounding_steps" not in optimizer.param_groups[0]
    train(model, optimizer, range(1))
    assert optimizer.param_groups[0]["rounding_steps"] == 1


def test_the_plain_step_refuses_a_frozen_parameter_in_fp16() -> None:
    """It may be trained later."""
    model = net()
    model.get_submodule("0").requires_grad_(False).half()
    with pytest.raises(TypeError, match="parameter 0 is in fp16"):
        ROUNDING.step(torch.optim.AdamW(model.parameters()))


WEIGHT = torch.nn.Parameter(torch.ones(2, 2, dtype=BF16))
PLAIN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a module": ({"optimizer": net()}, TypeError, "is for a plain optimizer, not a"),
    "names": ({"gradients": {"weight": torch.ones(2, 2)}}, TypeError, "a mapping by parameter, and not by name"),
    "a list": ({"gradients": [torch.ones(2, 2)]}, TypeError, "gradients are a mapping by parameter"),
    "too few": ({"among": []}, ValueError, "among lacks a parameter of the optimizer"),
}


@pytest.mark.parametrize("row", PLAIN)
def test_wrong_arguments_of_the_plain_step_are_refused_and_nothing_is_stepped(row: str) -> None:
    arguments, error, words = PLAIN[row]
    before = WEIGHT.detach().clone()
    WEIGHT.grad = torch.ones_like(WEIGHT)
    with pytest.raises(error, match=words):
        ROUNDING.step(**{"optimizer": torch.optim.SGD([WEIGHT], lr=1.0), **arguments})
    assert_same_bits(WEIGHT, before)


def test_the_plain_step_and_the_rounding_of_a_tensor_refuse_what_they_are_not_for() -> None:
    optimizer = ZeroOptimizer(build(0, BF16), process_group=solo(), rounding=ROUNDING)
    with pytest.raises(TypeError, match=r"not a ZeroOptimizer: .* rounds in its own step\(\)"):
        ROUNDING.step(optimizer)
    values: Any = [1.0]
    with pytest.raises(TypeError, match="rounds fp32 to bf16, not <class 'list'>"):
        ROUNDING.round(values)


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_that_count_other_steps_learn_of_it_before_anything_is_rounded(stage: int) -> None:
    def program(transport: Transport) -> None:
        model, optimizer = built(transport, stage, rounding=ROUNDING)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["rounding_steps"] = transport.rank
        sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr, no-untyped-call]
        with pytest.raises(ValueError, match="option 'rounding_steps' of the param groups differs between rank 0 and"):
            optimizer.step()
        for p, other in zip(model.parameters(), before, strict=True):
            assert_same_bits(p, other)

    on_threads(2, program)


@pytest.mark.parametrize("masters_first", [True, False])
def test_a_training_with_masters_goes_on_without_and_the_other_way_round(masters_first: bool, tmp_path: Path) -> None:
    """With the same bits at every topology: what has fp32 numbers is rounded to the nearest once, at the load."""
    kinds: list[dict[str, Any]] = [{"rounding": None}, {"rounding": ROUNDING}]
    before, after = kinds if masters_first else reversed(kinds)
    precision = MixedPrecision(BF16)

    def first(transport: Transport) -> None:
        model, optimizer = built(transport, 2, mixed_precision=precision, **before)
        train(model, optimizer, range(2))
        zero.save(tmp_path / "saved", optimizer)
        optimizer.close()

    def second(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        model, optimizer = built(transport, 3 if transport.world_size > 1 else 0, mixed_precision=precision, **after)
        zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, range(2, 4))
        return whole(model, optimizer)

    on_threads(2, first)
    (alone, states) = on_threads(1, second)[0]
    assert states["param_groups"][0].get("rounding_steps", 0) == 2
    for model, found in on_threads(3, second):
        assert_same_model(model, alone)
        assert_same_states(found, states)


def test_an_average_of_rounded_weights_is_that_of_the_plain_loop() -> None:
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    average = AveragedModel(plain)
    for step in range(3):
        for rank in range(2):
            net_loss(plain, 2 * step + rank).backward()
        ROUNDING.step(optimizer)
        optimizer.zero_grad()
        average.update_parameters(plain)

    def program(transport: Transport) -> dict[str, Tensor] | None:
        model = net()
        given = {"stage": 3, "process_group": transport, "divisor": 1, "rounding": ROUNDING}
        ours = ZeroOptimizer(model, torch.optim.SGD, lr=1e-2, momentum=0.9, **given)
        averaged = ShardedAverage(ours)
        for step in range(3):
            net_loss(model, 2 * step + transport.rank).backward()
            ours.step()
            ours.zero_grad()
            averaged.update_parameters()
        return averaged.gather(None)

    expected = dict(average.module.named_parameters())
    for found in on_threads(2, program):
        assert found is not None
        for name, value in found.items():
            assert_same_bits(value, expected[name])


class Momentum(torch.optim.Optimizer):
    """Gradient descent with a momentum that ``kept`` makes anew in each step, of the one before and the gradient."""

    def __init__(self, params: Any, kept: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self._kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._kept(self.state[p], p)
                    p.sub_(self.state[p].get("momentum", p.grad), alpha=group["lr"])


def narrow(state: Any, p: Any) -> None:
    state["momentum"] = (state.get("momentum", torch.zeros_like(p)) * 0.9 + p.grad).to(BF16)


def every_second(state: Any, p: Any) -> None:
    if "momentum" in state:
        del state["momentum"]
    else:
        state["momentum"] = p.grad * 0.5


def row_major(state: Any, p: Any) -> None:
    state["momentum"] = state.get("momentum", torch.zeros(p.shape)) * 0.9 + p.grad


def gram(state: Any, p: Any) -> None:
    state["momentum"] = state["gram"] = state.get("gram", torch.zeros(len(p), len(p))) + p.grad @ p.grad.T


@pytest.mark.parametrize("kept", [narrow, every_second])
def test_states_that_the_class_replaces_or_drops_are_those_that_it_left(kept: Any) -> None:
    plain = net()
    optimizer = Momentum(plain.parameters(), kept)
    for step in range(2):
        net_loss(plain, step).backward()
        before = {p: dict(optimizer.state[p]) for p in plain.parameters()}
        expected = {p: {name: value.to(torch.float32) for name, value in before[p].items()} for p in before}
        for p, state in expected.items():
            wide = p.detach().to(torch.float32)
            assert p.grad is not None
            wide.grad = p.grad.to(torch.float32)
            kept(state, wide)
        ROUNDING.step(optimizer)
        for p, state in expected.items():
            assert optimizer.state[p].keys() == state.keys()
            if kept is narrow:
                assert_same_bits(optimizer.state[p]["momentum"], state["momentum"])
        optimizer.zero_grad()
    model = net()
    ours = ZeroOptimizer(model, Momentum, stage=1, process_group=solo(), rounding=ROUNDING, kept=kept)
    for step in range(2):
        net_loss(model, step).backward()
        ours.step()
        ours.zero_grad()
    assert_same_states(ours.state_dict(), {"state": {i: s for i, s in optimizer.state_dict()["state"].items() if s}})
    assert_same_model(model, plain)


@pytest.mark.parametrize("side", [8, 128])
def test_a_state_that_is_as_large_because_all_parameters_are_square_is_rounded(side: int) -> None:
    plain, model = (seeded(0, lambda: nn.Linear(side, side, bias=False).bfloat16()) for _ in range(2))
    optimizer = Momentum(plain.parameters(), gram)
    given: dict[str, Any] = {"process_group": solo(), "rounding": ROUNDING, "partition": "parameter", "kept": gram}
    ours = ZeroOptimizer(model, Momentum, **given)
    for step, each in [(0, plain), (0, model), (1, plain), (1, model)]:
        each(torch.full((3, side), step + 0.1, dtype=BF16)).square().sum().backward()
        ROUNDING.step(optimizer) if each is plain else ours.step()
        each.zero_grad()
    assert_same_states(ours.state_dict(), optimizer.state_dict())
    assert_same_model(model, plain)


def test_a_state_in_another_memory_order_is_refused() -> None:
    """The plain loop would round it."""
    model = nn.Linear(5, 3, bias=False, dtype=BF16)
    model.weight = nn.Parameter(torch.ones(5, 3, dtype=BF16).t())
    given: dict[str, Any] = {"process_group": solo(), "rounding": ROUNDING, "partition": "parameter", "kept": row_major}
    optimizer = ZeroOptimizer(model, Momentum, **given)
    model(torch.ones(2, 5, dtype=BF16)).sum().backward()
    with pytest.raises(Exception, match="the state 'momentum' of 'weight' has another memory order"):
        optimizer.step()
