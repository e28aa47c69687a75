"""Bad input: one clear error that names what, where and the remedy, on every rank, and no state is lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from collectives.backends.gloo import connect
from zero import ZeroOptimizer

from .support.models import odd_batches, odd_loss
from .support.plain import assert_same_model, plain_step
from .support.programs import locked_build
from .support.small import TwoVectors, with_sgd

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


def on_ranks(world_size: int, program: Callable[[Transport], Any]) -> list[str]:
    """Return each rank's error, as text."""

    def guarded(transport: Transport) -> str:
        try:
            program(transport)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return on_threads(world_size, guarded, timeout=5)


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


@pytest.mark.parametrize("stage", [4, -1, "2", True, None])
def test_a_stage_that_does_not_exist(stage: Any) -> None:
    with pytest.raises(ValueError, match=r"stage must be one of \[0, 1, 2, 3\], not"):
        ZeroOptimizer(linear(), stage=stage)


def test_a_parameter_twice_in_the_groups() -> None:
    model = linear()
    with pytest.raises(ValueError, match="'weight' is listed twice"):
        ZeroOptimizer([{"params": [model.weight]}, {"params": [model.bias, model.weight]}], module=model)
    with pytest.raises(ValueError, match="'parameter 1' is listed twice"):
        ZeroOptimizer([model.weight, model.weight])


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.float8_e4m3fn])
def test_a_parameter_of_a_dtype_that_cannot_be_optimised(dtype: torch.dtype) -> None:
    model = linear()
    model.register_parameter("counter", nn.Parameter(torch.zeros(3).to(dtype)))
    with pytest.raises(TypeError, match=f"'counter' is {dtype}.* or freeze it"):
        ZeroOptimizer(model)


def test_a_parameter_with_overlapping_memory() -> None:
    model = linear()
    model.wide = nn.Parameter(torch.zeros(1, 4).expand(5, 4))
    with pytest.raises(ValueError, match=r"'wide' overlaps itself in memory .*clone"):
        ZeroOptimizer(model)


def test_two_parameters_that_share_memory() -> None:
    model = linear()
    model.twin = nn.Parameter(model.weight.detach())
    with pytest.raises(ValueError, match="share memory but are different parameters"):
        ZeroOptimizer(model)


def test_a_parameter_that_is_not_a_leaf() -> None:
    model = linear()
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        ZeroOptimizer([model.weight * 2])


@ALL_STAGES
def test_sparse_gradients(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.1)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    for message in on_ranks(2, program):
        assert "'weight' is torch.sparse_coo: sparse gradients are not supported" in message
        assert "sparse=False" in message


class WholeTensor(torch.optim.Optimizer):
    """A user's class whose update depends on the whole tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-8) * group["lr"])


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, WholeTensor])
def test_an_optimizer_class_that_is_not_element_wise(cls: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=f'{cls.__name__} is not element-wise: .*leave out partition=, or use "par'):
        ZeroOptimizer(nn.Linear(8, 8, bias=False), cls, partition="element")


def test_an_optimizer_class_that_looks_at_all_parameters() -> None:
    with pytest.raises(
        ValueError, match=r"LBFGS cannot be sharded: .*closure.*\. A rank steps the parameters that it owns"
    ):
        ZeroOptimizer(nn.Linear(8, 8, bias=False), torch.optim.LBFGS)


def test_the_classes_own_complaints_come_through() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        ZeroOptimizer(linear(), torch.optim.AdamW, lr=-1)
    with pytest.raises(TypeError, match="momentum"):
        ZeroOptimizer(linear(), torch.optim.AdamW, momentum=0.9)


def test_no_process_group_although_the_environment_says_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2, but no process group is initialised: call"):
        connect(None)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeroOptimizer(linear())


def test_ranks_that_built_different_models_learn_the_first_difference() -> None:
    def program(transport: Transport) -> None:
        ZeroOptimizer(nn.Linear(3, 3 + (transport.rank == 2)), process_group=transport)

    for message in on_ranks(3, program):
        assert "rank 0 has [weight [3, 3]" in message
        assert "rank 2 has [weight [4, 3]" in message


@pytest.mark.parametrize(
    ("argument", "values"), [("stage", (1, 2)), ("bucket_cap_mb", (1, 2)), ("collective", ("ring", "auto"))]
)
def test_ranks_that_chose_different_settings(argument: str, values: tuple[Any, Any]) -> None:
    def program(transport: Transport) -> None:
        ZeroOptimizer(linear(), process_group=transport, **{argument: values[transport.rank]})

    for message in on_ranks(2, program):
        assert "different models or optimizers" in message


def test_an_error_that_one_rank_finds_while_building_reaches_every_rank() -> None:
    def program(transport: Transport) -> None:
        model = linear()
        if transport.rank == 1:
            model.wide = nn.Parameter(torch.zeros(1, 4).expand(5, 4))
        ZeroOptimizer(model, process_group=transport)

    messages = on_ranks(3, program)
    assert all("'wide' overlaps itself" in message for message in messages)
    assert "rank 1: " in messages[0]


def replace_weight(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(3, 3))


def assign_data(model: nn.Linear) -> None:
    model.weight.data = torch.zeros(3, 3)


def cast(model: nn.Linear) -> None:
    model.double()


def delete(model: nn.Linear) -> None:
    model.bias = None  # type: ignore[assignment]


@ALL_STAGES
@pytest.mark.parametrize("change", [replace_weight, assign_data, cast, delete])
@pytest.mark.parametrize("where", ["everywhere", "rank 1 alone"])
def test_a_module_whose_parameters_were_replaced_moved_or_cast(stage: int, change: Any, where: str) -> None:
    def program(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport)
        if where == "everywhere" or transport.rank == 1:
            change(model)
        optimizer.step()

    for message in on_ranks(2, program):
        assert "RuntimeError: rank" in message
        assert "'weight'" in message or "'bias'" in message
        assert "was replaced" in message or "is now torch.float64" in message
        assert where == "everywhere" or "rank 1: " in message


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_was_replaced_is_told_also_after_further_parameters_came(stage: int) -> None:
    model, further = linear(), nn.Parameter(torch.ones(3))
    optimizer = ZeroOptimizer(model.parameters(), stage=stage)
    assign_data(model)
    optimizer.add_param_group({"params": [further]})
    with pytest.raises(RuntimeError, match=r"the memory of 'parameter 0' was replaced"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_memory_that_moves_with_all_its_parameters_is_no_replacement(stage: int) -> None:
    model, plain = linear_locked(), linear_locked()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.5)
    model.share_memory()
    for each, sgd in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.5))):
        for _ in range(2):
            each(torch.ones(1, 3)).sum().backward()
            sgd.step()
            each.zero_grad()
    assert_same_model(model, plain)


@ALL_STAGES
def test_step_and_clip_inside_no_sync(stage: int) -> None:
    model = linear()
    optimizer = ZeroOptimizer(model, stage=stage)
    with optimizer.no_sync():
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"step\(\) inside no_sync\(\): call it after the block"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) inside no_sync"):
            optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def test_no_sync_ends_with_an_exception() -> None:
    model = linear()
    optimizer = ZeroOptimizer(model)
    with pytest.raises(ZeroDivisionError), optimizer.no_sync():
        raise ZeroDivisionError
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_add_param_group_with_a_known_parameter() -> None:
    model = linear()
    optimizer = ZeroOptimizer(model)
    with pytest.raises(ValueError, match="add_param_group: 'weight' is in a param group already"):
        optimizer.add_param_group({"params": model.weight})
    assert len(optimizer.param_groups) == 1


@ALL_STAGES
@pytest.mark.parametrize("settle", ["step", "clip"])
def test_a_backward_after_clip_or_step_without_zero_grad(stage: int, settle: str) -> None:
    def program(transport: Transport) -> str:
        model = linear()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step() if settle == "step" else optimizer.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()  # the optimizer is still usable
        optimizer.step()
        optimizer.check_replicas()
        return str(caught.value)

    for message in on_threads(2, program, timeout=5):
        assert "without zero_grad()" in message
        assert "call optimizer.zero_grad() first" in message
        assert "'weight'" in message


@pytest.mark.parametrize("value", [0, float("nan"), float("inf"), "3", None, True])
def test_a_divisor_that_is_no_finite_number(value: Any) -> None:
    optimizer = ZeroOptimizer(linear())
    with pytest.raises(ValueError, match="the divisor must be a finite number other than 0"):
        optimizer.divisor = value


@ALL_STAGES
def test_a_divisor_that_differs_between_ranks(stage: int) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = linear_locked()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.1)
        optimizer.divisor = 2 + transport.rank
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValueError, match="divisor") as caught:
            optimizer.step()
        optimizer.divisor = 2
        optimizer.step()  # nothing was lost
        return str(caught.value), model

    plain = linear_locked()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    (plain(torch.ones(1, 3)).sum() * 1).backward()
    sgd.step()
    for message, model in on_threads(2, program, timeout=5):
        assert "is 2 on rank 0, but 3 on rank 1" in message
        assert_same_model(model, plain)


def linear_locked() -> nn.Linear:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + index)
    return model


def test_a_divisor_set_too_late() -> None:
    model = linear()
    optimizer = ZeroOptimizer(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"the divisor was set after clip_grad_norm_\(\)"):
        optimizer.divisor = 3
    optimizer.step()
    optimizer.divisor = 3


def test_a_state_dict_of_another_model_changes_nothing() -> None:
    model = linear()
    optimizer = ZeroOptimizer(model, torch.optim.Adam)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())

    def other(build: nn.Module, cls: type[torch.optim.Optimizer] = torch.optim.Adam) -> dict[str, Any]:
        plain = cls(build.named_parameters(), lr=0.5)
        for p in build.parameters():
            p.grad = torch.ones_like(p)
        plain.step()
        return plain.state_dict()

    renamed = nn.Module()
    renamed.weight = nn.Parameter(torch.zeros(3, 3))
    renamed.offset = nn.Parameter(torch.zeros(3))
    lacking = other(linear())
    del lacking["param_groups"][0]["betas"]
    wrong = {
        "has shape (4, 3) in the state dict, but the parameter has (3, 3)": other(nn.Linear(3, 4)),
        "the state dict has 1 parameters, this optimizer 2": other(nn.Linear(3, 3, bias=False)),
        "the state dict has 'offset', this optimizer 'bias'": other(renamed),
        "the state dict has no 'amsgrad'": other(linear(), torch.optim.SGD),
        "the state dict has no 'betas': it belongs to another class": lacking,
        "has 0 param groups": {"state": {}, "param_groups": []},
        "a torch.optim state dict is needed": {},
    }
    for message, state_dict in wrong.items():
        with pytest.raises(ValueError, match=r".") as caught:
            optimizer.load_state_dict(state_dict)
        assert message in str(caught.value)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, state in before["state"].items():
            assert all(torch.equal(value, after["state"][index][key]) for key, value in state.items())


@ALL_STAGES
def test_a_gradient_that_was_assigned_by_hand(stage: int) -> None:
    model = linear()
    optimizer = ZeroOptimizer(model, stage=stage)
    model.weight.grad = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="the gradient of 'weight' was assigned from outside"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [[], ["whole"], ["whole", "half", "whole"]])
def test_a_gradient_that_was_assigned_is_told_before_a_backward_adds_to_it(stage: int, before: list[str]) -> None:
    """Whichever parameter has it: the first that a backward reaches, or a later one."""

    def backward() -> None:
        model(torch.ones(1, 3)).sum().backward()

    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = ZeroOptimizer(model, stage=stage)
        for reached in before:
            model[1].requires_grad_(reached == "whole")
            backward()
            optimizer.zero_grad()
        parameter = model.get_parameter(name)
        parameter.grad = torch.ones(parameter.shape)
        with pytest.raises(RuntimeError, match=f"the gradient of {name!r} was assigned from outside"):
            backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_further_parameter_with_a_gradient_is_refused_on_every_rank_until_that_is_none(stage: int) -> None:
    """After a step gradients are cleared before anything uses them, so there it is taken."""

    def two() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        return model

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        model.zero_grad()

    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = two()
        further = model[1].weight
        optimizer = ZeroOptimizer(
            model[0].parameters(), torch.optim.SGD, stage=stage, module=model, process_group=transport, lr=0.1
        )
        if transport.rank == 1:
            further.grad = torch.ones(3, 3)
        with pytest.raises(ValueError, match=r".") as raised:
            optimizer.add_param_group({"params": [further]})
        assert len(optimizer.param_groups) == 1
        further.grad = None
        optimizer.add_param_group({"params": [further]})
        step(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": [model[1].bias]})
        model.zero_grad()
        step(model, optimizer)
        optimizer.close()
        return str(raised.value), model

    plain = two()
    optimizer = torch.optim.SGD([*plain[0].parameters(), plain[1].weight], lr=0.1)
    for _ in range(2):
        step(plain, optimizer)
    optimizer.add_param_group({"params": [plain[1].bias]})
    step(plain, optimizer)
    for said, model in on_threads(2, program, timeout=5):
        assert said.removeprefix("rank 1: ").startswith("add_param_group: '1.weight' has a gradient already")
        assert "set p.grad = None" in said
        assert_same_model(model, plain)


@ALL_STAGES
def test_a_gradient_from_before_the_optimizer_is_cleared_or_loud(stage: int) -> None:
    model = linear()
    model(torch.ones(1, 3)).sum().backward()
    optimizer = ZeroOptimizer(model, stage=stage)
    with pytest.raises(RuntimeError, match=r"'weight' was assigned from outside.*set it to None"):
        optimizer.step()
    optimizer.zero_grad()
    assert model.weight.grad is None
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@ALL_STAGES
def test_reentrant_checkpointing_is_refused_with_the_reason(stage: int) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = ZeroOptimizer(model, stage=stage)
    inputs = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model[1](checkpoint(model[0], inputs, use_reentrant=True)).sum().backward()
    optimizer.zero_grad()
    model[1](checkpoint(model[0], inputs, use_reentrant=False)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("argument", "value"), [("bucket_cap_mb", 0), ("bucket_cap_mb", float("nan")), ("collective", "tree")]
)
def test_arguments_that_cannot_be(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=argument):
        ZeroOptimizer(linear(), **{argument: value})


def test_params_that_are_no_parameters() -> None:
    with pytest.raises(TypeError, match="not one tensor"):
        ZeroOptimizer(torch.zeros(3, requires_grad=True))
    with pytest.raises(ValueError, match="two different modules"):
        ZeroOptimizer(linear(), module=linear())
    with pytest.raises(ValueError, match="empty"):
        ZeroOptimizer([])


def test_clip_arguments() -> None:
    optimizer = ZeroOptimizer(linear())
    with pytest.raises(ValueError, match="norm_type"):
        optimizer.clip_grad_norm_(1.0, norm_type=0)
    with pytest.raises(ValueError, match="max_norm"):
        optimizer.clip_grad_norm_(float("nan"))


@ALL_STAGES
def test_a_norm_that_is_not_finite_is_an_error_where_asked_and_clips_nothing(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport)
        (model(torch.ones(1, 3)).sum() * (float("inf") if transport.rank == 1 else 1)).backward()
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)

    for message in on_ranks(2, program):
        assert "nothing was clipped" in message or "non-finite" in message


def test_a_closed_optimizer_and_copies_say_so() -> None:
    model = linear()
    optimizer = ZeroOptimizer(model)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(optimizer)
    optimizer.close()
    for call in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.check_replicas):
        with pytest.raises(RuntimeError, match="this optimizer is closed"):
            call()


def test_state_dict_of_a_shard_says_what_to_call() -> None:
    def program(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, process_group=transport)
        optimizer.consolidate_state_dict(to=1)
        if transport.rank == 1:
            optimizer.state_dict()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.state_dict()

    for message in on_ranks(2, program):
        assert "consolidate_state_dict(to=rank)" in message


def test_replicas_that_differ_are_found_and_named() -> None:
    def program(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, process_group=transport)
        optimizer.check_replicas()
        if transport.rank == 2:
            model.bias.data[1] += 1
        optimizer.check_replicas()

    for message in on_ranks(3, program):
        assert "'bias' differs between rank 0 and rank 2" in message


def test_an_exception_inside_a_forward_leaves_everything_usable() -> None:
    def program(transport: Transport) -> nn.Module:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, process_group=transport, lr=0.1)
        with pytest.raises(IndexError):
            odd_loss(model, (torch.tensor([1] * 7 + [99, 1]), False)).backward()
        odd_loss(model, odd_batches(2)[transport.rank]).backward()
        optimizer.step()
        optimizer.check_replicas()
        return model

    plain = locked_build(0)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in odd_batches(2):
        odd_loss(plain, batch).backward()
    for p in plain.parameters():
        if p.grad is not None:
            p.grad.div_(2)
    sgd.step()
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


class Fails(torch.autograd.Function):
    """A function whose backward raises on request."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.fail:
            raise ZeroDivisionError("in a backward")
        return gradient, None


@ALL_STAGES
@pytest.mark.parametrize("failing", [(0, 1, 2), (1,)])
def test_an_exception_inside_a_backward_leaves_everything_usable(stage: int, failing: tuple[int, ...]) -> None:
    """On all ranks or on one: the others' collectives still match, and after zero_grad the next step is exact."""

    def program(transport: Transport) -> nn.Module:
        model = chain()
        optimizer = ZeroOptimizer(
            model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.1, bucket_cap_mb=1e-6
        )
        hidden = Fails.apply(model[0](torch.ones(1, 3)), transport.rank in failing)
        if transport.rank in failing:
            with pytest.raises(ZeroDivisionError):
                model[1](hidden).sum().backward()
        else:
            model[1](hidden).sum().backward()
        optimizer.zero_grad()
        model(torch.full((1, 3), 1.0 + transport.rank)).sum().backward()
        optimizer.step()
        optimizer.check_replicas()
        return model

    plain = chain()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rank in range(3):
        plain(torch.full((1, 3), 1.0 + rank)).sum().backward()
    for p in plain.parameters():
        p.grad.div_(3)  # type: ignore[union-attr]
    sgd.step()
    for model in on_threads(3, program, timeout=5):
        assert_same_model(model, plain)


def chain() -> nn.Sequential:
    return nn.Sequential(linear_locked(), linear_locked())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_calls_inside_a_backward_are_refused_and_the_step_is_right(stage: int) -> None:
    def program(transport: Transport) -> tuple[list[str], nn.Module]:
        model, found = chain(), list[str]()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.1)
        more = {"params": [nn.Parameter(torch.zeros(3))]}

        def act(_: Tensor) -> None:
            for call in (optimizer.zero_grad, optimizer.step, lambda: optimizer.add_param_group(more)):
                with pytest.raises(RuntimeError) as caught:
                    call()
                found.append(str(caught.value))

        hidden = model(torch.ones(1, 3))
        last = next(iter(model[0].parameters()))  # when this is reached, other parameters have gradients
        with last.register_post_accumulate_grad_hook(act):
            hidden.sum().backward()
        optimizer.step()
        optimizer.close()
        return found, model

    plain = chain()
    plain_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), lambda m, x: m(x).sum(), [torch.ones(1, 3)] * 2, 2)
    for found, model in on_threads(2, program, timeout=5):
        assert [message.split(" inside")[0] for message in found] == ["zero_grad()", "step()", "add_param_group()"]
        assert_same_model(model, plain)


def test_ranks_that_clear_or_freeze_alone_are_told_where_no_bucket_can_tell() -> None:
    def clears(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, process_group=transport)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        if transport.rank == 1:
            optimizer.zero_grad()
        optimizer.step()

    def freezes(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, process_group=transport)
        model.bias.requires_grad_(transport.rank == 0)
        optimizer.step()

    for message in on_ranks(2, clears):
        assert "step(): the gradients of rank 0 are divided, those of rank 1 open: clip, step and clear" in message
    for message in on_ranks(2, freezes):
        assert "step(): 'bias' is trainable on rank 0, but frozen on rank 1: freeze and unfreeze on every" in message


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_parameters_and_arguments_that_cannot_be() -> None:
    result = nn.Parameter(torch.ones(3)) * 2
    result.retain_grad()  # torch itself would then accept it
    with pytest.raises(ValueError, match="'p' is the result of a computation"):
        ZeroOptimizer([("p", result)])
    scripted: Any = torch.jit.script(linear())
    with pytest.raises(ValueError, match="'the module' is a ScriptModule"):
        ZeroOptimizer(scripted)
    with pytest.raises(TypeError, match="units must be a function of a module that returns a bool, not 'blocks'"):
        ZeroOptimizer(chain(), stage=3, units="blocks")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="consolidate_state_dict: rank 9 is not one of the 1 ranks"):
        ZeroOptimizer(linear()).consolidate_state_dict(9)


class OddState(torch.optim.SGD):
    """A class that keeps a state of another shape than the parameter's."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(2, 2)


def test_a_state_of_another_shape_makes_a_class_not_element_wise() -> None:
    with pytest.raises(ValueError, match=r"OddState is not element-wise: .*its state 'history' has shape \(2, 2\)"):
        ZeroOptimizer(linear(), OddState, partition="element", lr=0.1)


def test_ranks_with_the_same_shapes_in_another_order_are_told() -> None:
    def program(transport: Transport) -> str:
        names = ("left", "right") if transport.rank == 0 else ("right", "left")
        with pytest.raises(ValueError, match="the ranks built different models") as caught:
            with_sgd(nn.ModuleDict({name: nn.Linear(3, 3) for name in names}), transport)
        return str(caught.value)

    for message in on_threads(2, program, timeout=5):
        assert "rank 0 has [left.weight [3, 3]" in message
        assert "rank 1 has [right.weight [3, 3]" in message


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_one_rank_alone_freezes_is_an_error_on_every_rank(stage: int) -> None:
    """Even if it shares a bucket with other parameters, which are reduced as usual."""

    def program(transport: Transport) -> str:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=stage)
        model.a.requires_grad_(transport.rank == 0)
        try:
            model(1.0).backward()
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    messages = on_threads(2, program, timeout=5)
    assert all("trainable" in message for message in messages), messages
    assert any("'a'" in message for message in messages), messages


class Rate(float):
    """A number equal to that of the other ranks, which fails in a step."""

    def __neg__(self) -> float:
        raise TypeError("this rate cannot be used")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_one_ranks_step_is_told_to_the_others(stage: int) -> None:
    """Long before a time limit would end their waits, and with the reason."""

    def program(transport: Transport) -> str:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=stage)
        model(1.0).backward()
        if transport.rank == 1:
            optimizer.param_groups[0]["lr"] = Rate(0.1)
        try:
            optimizer.step()
            optimizer.check_replicas()
        except Exception as error:
            return str(error)
        return "nothing"

    messages = on_threads(3, program, timeout=5)
    assert messages[1] != "nothing"
    for rank in (0, 2):
        assert "rank 1 failed: rank 1, in step(): TypeError" in messages[rank]
