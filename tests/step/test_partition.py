"""Classes that need whole parameters: each parameter has one owner, and the bits are those of the plain loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.plain import assert_same_model, assert_same_states, plain_step
from ..support.programs import BY_PARAMETER, Program, Round, Step, compare, run_rank
from ..support.shampoo import Shampoo
from ..support.warned import own
from .test_elementwise import OPTIONS, REFUSED, EstimatesTogether, net

TRIED = pytest.mark.usefixtures("every_trial_runs")

STAGES = (0, 1, 2, 3)
STEPS = (
    Step((Round(), Round(sync=False)), clips=((0.1, 2.0),)),
    Step((Round(),), step=False, clear="none"),
    Step((Round(), Round())),
)


def check(program: Program) -> None:
    results = on_threads(program.world_size, lambda transport: run_rank(program, transport), timeout=5)
    plain = compare(program, results)
    assert_same_states(results[0][3], plain.optimizer.state_dict())


@pytest.mark.parametrize("optimizer", BY_PARAMETER)
@pytest.mark.parametrize("stage", STAGES)
def test_classes_that_need_whole_parameters_give_the_bits_of_the_plain_loop(stage: int, optimizer: str) -> None:
    for world_size, cap in ((1, 25.0), (2, 0.0005), (3, 1e-6), (4, 25.0), (6, 0.0005)):
        check(Program(world_size, stage, optimizer, cap, steps=STEPS))


@pytest.mark.parametrize("optimizer", BY_PARAMETER)
@pytest.mark.parametrize("precision", ["bf16", "bf16, sent in fp32", "bf16, added up in bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_so_they_do_in_mixed_precision(stage: int, precision: str, optimizer: str) -> None:
    check(Program(3, stage, optimizer, precision=PRECISIONS[precision], steps=STEPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_and_in_other_dtypes(dtype: torch.dtype) -> None:
    for stage, optimizer in product(STAGES, BY_PARAMETER):
        check(Program(2, stage, optimizer, dtype=dtype, steps=STEPS))


@pytest.mark.parametrize("collective", ["pairwise", "shared", "hierarchical"])
def test_and_by_every_exact_collective(collective: str) -> None:
    for stage in STAGES:
        check(Program(4, stage, "shampoo", collective=collective, steps=STEPS))


@pytest.mark.parametrize("stage", STAGES[1:])
def test_and_with_several_copies(stage: int) -> None:
    check(Program(4, stage, "shampoo", sharding_factor=2, steps=STEPS))


@pytest.mark.parametrize("reshard", [False, 2])
def test_and_where_units_are_kept_for_the_backward(reshard: bool | int) -> None:
    check(Program(4, 3, "shampoo", reshard=reshard, steps=STEPS))


# -- Muon, which takes matrices alone ----------------------------------------------------------------------------------


class Matrices(nn.Module):
    """A model of matrices: a tied one, one with another memory order, one that is larger than all others together, a
    square one, a frozen one and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8, bias=False)) for _ in range(3)
        )
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.blocks[1][2].weight = nn.Parameter(self.blocks[1][2].weight.detach().t().contiguous().t())
        self.large = nn.Sequential(nn.Linear(8, 150, bias=False), nn.Tanh(), nn.Linear(150, 8, bias=False))
        self.square, self.frozen = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.unused, self.head = nn.Linear(5, 7, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.large):
            x = x + block(x)
        return self.head(self.frozen(self.square(x)))


MATRIX_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02, "weight_decay": 0.1}),
}
MICRO_BATCHES = 12


def matrices(dtype: torch.dtype = torch.float32) -> Matrices:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Matrices().to(dtype)


def batch(step: int, number: int, model: nn.Module) -> Tensor:
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + number))
    return values.to(next(model.parameters()).dtype)


def plain(name: str, dtype: torch.dtype, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    cls, options = MATRIX_CLASSES[name]
    model = matrices(dtype)
    optimizer = cls(model.parameters(), **options)
    train_plainly(model, optimizer, range(steps))
    return model, optimizer


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batches = [batch(step, number, model) for number in range(MICRO_BATCHES)]
        plain_step(model, optimizer, lambda model, x: model(x).square().mean(), batches, MICRO_BATCHES, 0.5)
        optimizer.zero_grad()


def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range = range(3)) -> None:
    optimizer.divisor = MICRO_BATCHES
    for step in steps:
        for number in range(optimizer.rank, MICRO_BATCHES, optimizer.world_size):
            model(batch(step, number, model)).square().mean().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(world_size: int, run: Callable[[nn.Module, Transport], Any], dtype: torch.dtype) -> list[Any]:
    models = [matrices(dtype) for _ in range(world_size)]
    return on_threads(world_size, lambda transport: run(models[transport.rank], transport), timeout=10)


def matrix_optimizer(name: str, model: nn.Module, group: Any, **arguments: Any) -> ZeroOptimizer:
    cls, options = MATRIX_CLASSES[name]
    return ZeroOptimizer(model, cls, process_group=group, partition="parameter", **options, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATRIX_CLASSES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3, *(pytest.param(size, marks=pytest.mark.long) for size in (4, 6))])
def test_matrices_give_the_bits_of_the_plain_loop(world_size: int, stage: int, name: str, dtype: torch.dtype) -> None:
    expected, stepped = plain(name, dtype)

    def run(model: nn.Module, transport: Transport) -> Any:
        optimizer = matrix_optimizer(name, model, transport, stage=stage, bucket_cap_mb=0.002)
        train(model, optimizer)
        optimizer.consolidate_state_dict(0)
        states = optimizer.state_dict() if transport.rank == 0 else None
        optimizer.close()
        return model, states

    results = on_ranks(world_size, run, dtype)
    for model, _ in results:
        assert_same_model(model, expected)
    assert_same_states(results[0][1], stepped.state_dict())
    stepped.load_state_dict(results[0][1])  # torch's own class takes it


def test_a_class_is_partitioned_by_parameter_where_it_is_not_element_wise_with_one_line_that_says_so() -> None:
    for cls, options in MATRIX_CLASSES.values():
        with pytest.warns(
            UserWarning, match=rf'{cls.__name__} is not element-wise .*\(partition="parameter"\)'
        ) as said:
            optimizer = ZeroOptimizer(matrices(), cls, process_group=solo(), **options)
        assert [warning.filename for warning in own(said)] == [__file__]
        assert all(spec.one_owner for spec in parts_of(optimizer).storage.layout.parameters)
        optimizer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked in (None, "element"):
            optimizer = ZeroOptimizer(matrices(), torch.optim.AdamW, process_group=solo(), partition=asked)
            assert not any(spec.one_owner for spec in parts_of(optimizer).storage.layout.parameters)
            optimizer.close()


def test_a_param_group_may_have_a_partition_of_its_own() -> None:
    """The others keep theirs, and neither shows in the options."""

    def run(model: nn.Module, transport: Transport) -> nn.Module:
        groups = [
            {"params": list(model.blocks.parameters()), "partition": "parameter"},  # type: ignore[union-attr]
            {"params": list(model.large.parameters())},  # type: ignore[union-attr]
        ]
        optimizer = ZeroOptimizer(groups, torch.optim.AdamW, stage=3, module=model, process_group=transport, lr=0.02)
        optimizer.add_param_group({"params": [model.head.weight], "partition": "parameter"})  # type: ignore[union-attr]
        optimizer.add_param_group({"params": [model.square.weight], "lr": 0.1})  # type: ignore[union-attr]
        assert [spec.one_owner for spec in sorted(parts_of(optimizer).storage.listed(), key=lambda s: s.index)] == [
            *[True] * 5, False, False, True, False,
        ]  # fmt: skip
        assert not any("partition" in group for group in optimizer.param_groups)
        train(model, optimizer)
        optimizer.close()
        return model

    expected = matrices()
    groups = [
        [*expected.blocks.parameters(), *expected.large.parameters(), expected.head.weight],
        [expected.square.weight],
    ]
    stepped = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.1}], lr=0.02)
    train_plainly(expected, stepped, range(3))
    for model in on_ranks(3, run, torch.float32):
        assert_same_model(model, expected)


@pytest.mark.parametrize("partition", ["rows", 1, ""])
def test_another_partition_is_an_error_on_every_rank(partition: Any) -> None:
    for arguments in ({"partition": partition}, {}):
        params: Any = matrices()
        if not arguments:
            params = [{"params": list(params.parameters()), "partition": partition}]
        with pytest.raises(ValueError, match=r'"element" .* or "parameter" .* param group 0'):
            ZeroOptimizer(params, torch.optim.AdamW, process_group=solo(), **arguments)


# -- what a rank holds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
@pytest.mark.parametrize("stage", STAGES[1:])
def test_no_rank_has_more_than_its_share_and_one_parameter_and_says_what_it_has(stage: int, world_size: int) -> None:
    def run(model: nn.Module, transport: Transport) -> Any:
        optimizer = matrix_optimizer("muon", model, transport, stage=stage)
        train(model, optimizer, range(1))
        told = optimizer.describe()
        optimizer.close()
        return told

    model = matrices()
    trained = [p.numel() * 4 for p in model.parameters() if p.requires_grad]
    whole = [p.numel() * 4 for p in model.parameters()]
    told = on_ranks(world_size, run, torch.float32)
    for rank, each in enumerate(told):
        assert each.formula_bytes["optimizer"] == each.bytes["optimizer"]
        assert each.formula_bytes["parameters"] == each.bytes["parameters"], rank
        assert each.bytes["optimizer"] <= sum(trained) / world_size + max(trained) + 64 * len(trained)  # padding
        if stage == 3:
            assert each.bytes["parameters"] <= sum(whole) / world_size + max(whole) + 64 * len(whole)
        assert "by parameter: 11 parameters" in str(each)
        assert ("large.0.weight (4,800 B)" in str(each)) is (4800 * world_size > sum(whole))
    assert sum(each.bytes["optimizer"] for each in told) <= sum(trained) + 64 * len(trained)  # some are unused
    if stage == 3:
        assert 0 <= sum(each.bytes["parameters"] for each in told) - sum(whole) <= 64 * len(whole)


# -- classes that are not element-wise ---------------------------------------------------------------------------------

TOGETHER = {"ClippedTogether", "RateByPlace", "OwnBuffers", "EstimatesTogether", "Rebinds"}


@TRIED
@pytest.mark.parametrize("name", sorted(TOGETHER))
@pytest.mark.parametrize("partition", [None, "parameter"])
def test_a_class_that_looks_at_more_than_a_parameter_is_an_error_that_says_why(partition: Any, name: str) -> None:
    why = "(beside others|than for several|one parameter failed)"
    with pytest.raises(ValueError, match=f"{name} cannot be sharded: .*{why}"):
        ZeroOptimizer(net(), REFUSED[name], process_group=solo(), partition=partition, **OPTIONS)


@TRIED
@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (torch.optim.LBFGS, r"LBFGS cannot be sharded: .*closure"),
        (torch.optim.SparseAdam, r"SparseAdam cannot be sharded: .*dense"),
        (torch.optim.Muon, r"Muon refuses 'scale', of shape \(\): .*2D"),
    ],
)
def test_so_is_one_that_cannot_be_stepped(cls: type[torch.optim.Optimizer], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ZeroOptimizer(net(), cls, process_group=solo())


class ScheduleFree(torch.optim.SGD):
    """A class like those of `schedulefree`: its weights are others for evaluations, and `step` refuses these."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def eval(self) -> None:
        self.trains = False

    def step(self, closure: Any = None) -> Any:
        if not self.trains:
            raise Exception("Optimizer was not in train mode when step is called.")
        return super().step(closure)


@TRIED
@pytest.mark.parametrize("partition", [None, "element", "parameter"])
def test_the_reason_against_a_schedule_free_class_is_the_calls_that_it_needs(partition: Any) -> None:
    with pytest.raises(ValueError, match=r"ScheduleFree cannot be sharded: its train\(\) and eval\(\)") as raised:
        ZeroOptimizer(net(), ScheduleFree, process_group=solo(), partition=partition)
    assert "not in train mode" in str(raised.value)
    assert "depends on nothing but" not in str(raised.value)


@TRIED
def test_the_rates_of_all_groups_are_tried_and_raised() -> None:
    for rate in (0.0, 1e-9):
        with pytest.raises(ValueError, match="EstimatesTogether cannot be sharded"):
            ZeroOptimizer(net(), EstimatesTogether, process_group=solo(), partition="parameter", lr=rate)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - TOGETHER))
def test_all_others_give_the_bits_of_the_plain_loop(name: str) -> None:
    model, expected = net(), net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = on_threads(2, lambda transport: one_class(copy.deepcopy(model), REFUSED[name], transport), timeout=10)
    stepped = REFUSED[name](expected.parameters(), **OPTIONS)
    for step in range(4):
        for rank in range(2):
            expected(rows(step, rank)).square().mean().backward()
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        stepped.step()
        stepped.zero_grad()
    for trained in results:
        assert_same_model(trained, expected)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(3, 13, generator=torch.Generator().manual_seed(10 * step + rank))


def one_class(model: nn.Module, cls: type[torch.optim.Optimizer], transport: Transport) -> nn.Module:
    optimizer = ZeroOptimizer(model, cls, stage=3, process_group=transport, **OPTIONS)
    for step in range(4):
        model(rows(step, transport.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return model


def test_a_state_that_cannot_be_sent_is_named_on_every_rank() -> None:
    """Its owner alone knows it."""

    def run(transport: Transport) -> str:
        optimizer = ZeroOptimizer(
            models[transport.rank], REFUSED["OwnObjects"], process_group=transport, partition="parameter", **OPTIONS
        )
        models[transport.rank](rows(0, 0)).sum().backward()
        optimizer.step()
        with pytest.raises(TypeError) as error:
            optimizer.consolidate_state_dict()
        optimizer.zero_grad()
        optimizer.close()
        return str(error.value)

    models = [net(), net()]
    first, second = on_threads(2, run, timeout=10)
    assert first == second
    assert "['keeper'] is a Keeper" in first


# -- the trial ---------------------------------------------------------------------------------------------------------


class LooksAtItsEquals(torch.optim.SGD):
    """Steps several parameters of one shape in another way than one alone, as classes do that stack them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            shapes = [p.shape for p in group["params"] if p.grad is not None]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / shapes.count(p.shape))


@TRIED
def test_others_of_the_same_shape_count() -> None:
    with pytest.raises(ValueError, match="LooksAtItsEquals cannot be sharded"):
        ZeroOptimizer(nn.Linear(3, 5, bias=False), LooksAtItsEquals, process_group=solo(), partition="parameter")


class LooksAtItsFirst(torch.optim.SGD):
    """Asks the first parameter of each group for its device, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["params"][0].device is not None
        super().step()


@TRIED
def test_a_step_on_a_rank_that_owns_nothing_is_tried() -> None:
    with pytest.raises(ValueError, match="LooksAtItsFirst cannot be sharded: a step over no parameter failed"):
        ZeroOptimizer(nn.Linear(3, 5), LooksAtItsFirst, process_group=solo(), partition="parameter")


@TRIED
def test_states_that_are_as_large_as_their_parameter_have_the_names_of_all_shapes() -> None:
    """A square parameter's preconditioner, in a state of its own, has the parameter's shape and is none of them."""

    class OfRows(Shampoo):
        def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
            super().update(parameter, gradient, group)
            self.state[parameter]["rows"] = self.state[parameter]["preconditioners"][0].clone()

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
    optimizer = ZeroOptimizer(model, OfRows, process_group=solo(), partition="parameter")
    assert parts_of(optimizer).user_optimizers.main.elementwise == {"momentum"}
    optimizer.close()


def test_a_matrix_of_more_elements_than_a_cut_run_is_stepped_whole() -> None:
    """The class is an element-wise one, so that its for-loop path would be cut; each parameter has one step count."""

    def run(transport: Transport) -> Any:
        optimizer = ZeroOptimizer(
            models[transport.rank], torch.optim.SGD, process_group=transport, partition="parameter", momentum=0.9, lr=1
        )
        models[transport.rank](torch.ones(1, 300)).sum().backward()
        optimizer.step()
        shapes = [run.parameter.shape for bucket in parts_of(optimizer).storage.buckets for run in bucket.states.runs]
        optimizer.close()
        return shapes

    models = [nn.Linear(300, 300, bias=False) for _ in range(2)]
    assert on_threads(2, run, timeout=10) == [[(300, 300)], []]


# -- saved states ------------------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_dict_at_another_stage_and_number_of_ranks() -> None:
    for (ranks, stage), (later, other) in [((3, 3), (2, 1)), ((1, 0), (3, 3)), ((2, 2), (4, 0))]:
        first = on_ranks(ranks, partial(shampoo_steps, stage=stage, steps=range(2)), torch.float32)
        second = on_ranks(later, partial(shampoo_steps, stage=other, steps=range(2, 4), states=first[0]), torch.float32)
        plainly = on_ranks(1, partial(shampoo_steps, stage=0, steps=range(4)), torch.float32)
        for model, _ in second:
            assert_same_model(model, plainly[0][0])
        assert_same_states(second[0][1], plainly[0][1])


def shampoo_steps(
    model: nn.Module, transport: Transport, *, stage: int, steps: range, states: Any = None
) -> tuple[nn.Module, Any]:
    if states is not None:
        model.load_state_dict(states[0].state_dict())
    optimizer = ZeroOptimizer(model, Shampoo, stage=stage, process_group=transport, partition="parameter")
    if states is not None:
        optimizer.load_state_dict(states[1])
    train(model, optimizer, steps)
    optimizer.consolidate_state_dict(None)
    found = optimizer.state_dict()
    optimizer.close()
    return model, found


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_hold_states_of_any_shape_and_training_goes_on_at_another_number_of_ranks(
    stage: int, tmp_path: Path
) -> None:
    def run(model: nn.Module, transport: Transport, steps: range, how: int) -> nn.Module:
        optimizer = ZeroOptimizer(model, Shampoo, stage=how, process_group=transport, partition="parameter")
        if steps.start:
            zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, steps)
        if not steps.start:
            zero.save(tmp_path / "saved", optimizer)
        optimizer.close()
        return model

    on_ranks(3, partial(run, steps=range(2), how=stage), torch.float32)
    saved = zero.open_checkpoint(tmp_path / "saved")
    states = saved.optimizer_state_dict()["state"]
    names = {f"preconditioners.{number}" for number, _ in enumerate(states[0]["preconditioners"])}
    assert len(names) == 2
    assert names < next(iter(saved.states().values())).keys(), "tensors in a list belong beside the JSON"
    for ranks in (1, 2, 4):
        found = on_ranks(ranks, partial(run, steps=range(2, 4), how=(stage + ranks) % 4), torch.float32)
        for model in found:
            assert_same_model(model, on_ranks(1, partial(shampoo_steps, stage=0, steps=range(4)), torch.float32)[0][0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_without_elements_are_sent_and_saved(world_size: int, tmp_path: Path) -> None:
    class Empty(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["none"] = [torch.empty(0, 3)]

    def run(model: nn.Module, transport: Transport) -> Any:
        optimizer = ZeroOptimizer(model, Empty, process_group=transport, partition="parameter", lr=0.1)
        train(model, optimizer, range(1))
        optimizer.consolidate_state_dict(None)
        zero.save(tmp_path / "saved", optimizer)
        states = optimizer.state_dict()["state"]
        optimizer.close()
        return states

    for states in on_ranks(world_size, run, torch.float32):
        assert {state["none"][0].shape for state in states.values()} == {(0, 3)}
    assert zero.open_checkpoint(tmp_path / "saved").optimizer_state_dict()["state"][0]["none"][0].shape == (0, 3)


# -- states of other dtypes --------------------------------------------------------------------------------------------

CODED = 64  # elements from which on `Codes` keeps its momentum in 8 bits


class Codes(torch.optim.Optimizer):
    """Keeps the momentum of a large parameter as whole numbers of 8 bits and one scale, as 8-bit classes do.

    The momentum of a large parameter, and of small ones, has the name "momentum" and the parameter's shape.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                wide = state["momentum"] * state["scale"] if state else torch.zeros_like(p)
                wide = wide * group["beta"] + p.grad
                if p.numel() < CODED:
                    state.update(momentum=wide, scale=1.0)
                else:
                    scale = wide.abs().amax().clamp_min(1e-12) / 127
                    state.update(momentum=(wide / scale).round().to(torch.int8), scale=scale)
                p.sub_(wide, alpha=group["lr"])


class TwoDtypes(torch.optim.Optimizer):
    """Keeps the momentum of a large parameter in bf16, and that of a small one in fp32."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dtype = torch.bfloat16 if p.numel() > CODED else torch.float32
                    before = self.state[p].get("momentum", torch.zeros_like(p))
                    self.state[p]["momentum"] = (before * 0.9 + p.grad).to(dtype)
                    p.sub_(self.state[p]["momentum"], alpha=group["lr"])


@pytest.mark.parametrize(
    ("cls", "dtypes", "by"),
    [
        pytest.param(Codes, {torch.float32, torch.int8}, "dict", id="dict"),
        pytest.param(Codes, {torch.float32, torch.int8}, "checkpoint", id="checkpoint"),
        pytest.param(TwoDtypes, {torch.float32, torch.bfloat16}, "checkpoint", id="floats"),  # a dict casts them
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_states_keep_their_dtype_beside_others_of_the_same_name(
    stage: int, cls: type[Codes | TwoDtypes], dtypes: set[torch.dtype], by: str, tmp_path: Path
) -> None:
    def run(model: nn.Module, transport: Transport, steps: range, how: int, saved: Any = None) -> Any:
        if saved is not None:
            model.load_state_dict(saved[0].state_dict())
        optimizer = ZeroOptimizer(model, cls, stage=how, process_group=transport, partition="parameter")
        if saved is not None:
            optimizer.load_state_dict(saved[1])
        elif steps.start:
            zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, steps)
        if by == "checkpoint" and not steps.start:
            zero.save(tmp_path / "saved", optimizer)
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model, states

    expected = matrices()
    stepped = cls(expected.parameters())
    train_plainly(expected, stepped, range(4))
    first = on_ranks(3, partial(run, steps=range(2), how=stage), torch.float32)[0]
    assert {state["momentum"].dtype for state in first[1]["state"].values()} == dtypes
    saved = first if by == "dict" else None
    for model, states in on_ranks(2, partial(run, steps=range(2, 4), how=(stage + 1) % 4, saved=saved), torch.float32):
        assert_same_model(model, expected)
        assert_same_states(states, stepped.state_dict())


@TRIED
def test_what_a_class_does_with_large_parameters_alone_is_tried() -> None:
    class MeansOfLarge(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            large = [p.grad for group in self.param_groups for p in group["params"] if p.numel() >= 4096]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] / (len(large) if p.numel() >= 4096 else 1))

    ZeroOptimizer(nn.Linear(63, 65, False), MeansOfLarge, process_group=solo(), partition="parameter", lr=0.1).close()
    with pytest.raises(ValueError, match=r"MeansOfLarge cannot be sharded: stepping a parameter of .* alone gave"):
        ZeroOptimizer(nn.Linear(500, 300), MeansOfLarge, process_group=solo(), partition="parameter", lr=0.1)


class WithTables(torch.optim.SGD):
    """Keeps a large table of numbers of each parameter, which differ between two parameters beside each other if
    ``apart``; a number that is nan, and one that is -0.0 or 0.0."""

    apart = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                own = torch.full((100, 100), torch.nan).where(
                    torch.arange(100.0) > 0, -0.0 if self.apart and number else 0.0
                )
                self.state[p]["tables"] = [{"table": own, "counts": (1, torch.nan)}]
        super().step()


class WithTablesApart(WithTables):
    apart = True


@TRIED
def test_the_trial_compares_bits_of_states_and_makes_no_text_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tensor = torch.Tensor.tolist

    def of_few(tensor: Tensor) -> Any:
        assert tensor.numel() < 100, "a large tensor was turned into a list"
        return of_tensor(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", of_few)
    model = nn.Linear(3, 5)
    ZeroOptimizer(model, WithTables, process_group=solo(), partition="parameter", lr=0.1).close()
    with pytest.raises(ValueError, match="its state 'tables' got another value for one parameter than for several"):
        ZeroOptimizer(model, WithTablesApart, process_group=solo(), partition="parameter", lr=0.1)
