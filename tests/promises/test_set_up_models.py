"""A model that was set up is trained by an optimizer that was set up, and a loader is dealt out once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from collectives import Transport, on_threads
from zero import MicroBatchSampler, MixedPrecision, ZeroOptimizer
from zero.integrations.conversion import Conversions

from ..contract.recipes import assert_same_dict
from ..support.errors import error_of, is_plain
from ..support.limits import BOUND
from ..support.plain import assert_same_model
from ..support.rows import rows


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def unowned(name: str) -> str:
    return f"RuntimeError: X: a backward gave a gradient to {name!r} of the Sequential, and no ZeroOptimizer has it"


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).square().mean().backward()


@pytest.mark.parametrize(("stage", "world_size"), rows([(3, 3), (1, 2)], [(0, 2), (2, 1)]))
def test_a_gradient_that_no_optimizer_averages_is_an_error_on_every_rank(stage: int, world_size: int) -> None:
    def program(transport: Transport) -> list[str]:
        model = network()
        conversions = Conversions({"stage": stage, "process_group": transport}, "X", "set it up")
        conversions.add(model)

        def refused() -> str:
            said = error_of(backward, model)
            model.zero_grad()
            return said

        def step() -> None:
            backward(model)
            optimizer.step()
            optimizer.zero_grad()

        found = [refused()]
        optimizer = conversions.convert(torch.optim.AdamW(model[0].parameters()))
        found.append(refused())
        model[2].requires_grad_(False)
        step()
        model[2].requires_grad_(True)
        found.append(refused())
        optimizer.add_param_group({"params": list(model[2].parameters())})
        step()
        conversions.close()
        assert is_plain(model)
        return found

    for found in on_threads(world_size, program, timeout=BOUND):
        assert [text[: len(unowned("2.bias"))] for text in found] == [unowned("2.bias")] * 3
        assert "would not average it: set it up. If nothing trains" in found[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_are_each_ranks_own_frozen_models_and_plain_ones_need_no_optimizer(stage: int) -> None:
    model, teacher, evaluated, early = (network() for _ in range(4))
    teacher.requires_grad_(False)
    conversions = Conversions({"stage": stage, "ignored": [model[2]]}, "X", "set it up")
    for each in (model, teacher, early):
        conversions.add(each)
    conversions.add(evaluated, trained=False)
    own = ZeroOptimizer(early, torch.optim.SGD, stage=stage, lr=0.1)  # which the trainer never gets
    optimizer = conversions.convert(torch.optim.AdamW(model[0].parameters()))
    backward(nn.Sequential(model, nn.Linear(2, 3), teacher))
    backward(evaluated)
    backward(early)
    optimizer.close()
    own.close()
    backward(model)  # plain again
    assert is_plain(model)
    conversions.forget()
    assert is_plain(teacher)
    other = Conversions({}, "X", "set it up")
    other.add(teacher)
    backward(copy.deepcopy(teacher.requires_grad_()))
    del other
    backward(teacher)
    assert is_plain(teacher)


def test_a_model_is_set_up_before_it_has_memory_and_in_inference_mode_and_not_before_it_has_shapes() -> None:
    conversions = Conversions({"param_init_fn": lambda part: part.reset_parameters()}, "X", "set it up")
    with torch.device("meta"):
        model = network()
    conversions.add(model)
    optimizer = conversions.convert(torch.optim.AdamW(model[0].parameters()))
    assert error_of(backward, model).startswith(unowned("2.bias"))
    optimizer.close()
    with torch.inference_mode():
        conversions.add(network().requires_grad_(False))
    with pytest.raises(ValueError, match="X: 'weight' of the LazyLinear is not initialised yet"):
        conversions.add(nn.LazyLinear(2))
    quantised = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)])
    conversions.add(quantised)
    assert not quantised[0]._post_accumulate_grad_hooks, "whole numbers are not watched"


@pytest.mark.parametrize("stage", rows([3], [0, 1, 2]))
def test_one_optimizer_trains_two_models(stage: int) -> None:
    """With equal batches, two ranks take the step of one."""

    def trained(first: nn.Module, second: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(3):
            second(first(torch.full((2, 3), 0.1 * number))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def program(transport: Transport) -> tuple[nn.Module, nn.Module, Any, Any]:
        first, second = models[transport.rank]
        conversions = Conversions({"stage": stage, "process_group": transport}, "X", "set it up")
        conversions.add(first)
        conversions.add(second)
        both = [*second.parameters(), *first.parameters()]
        optimizer = conversions.convert(torch.optim.AdamW(both, lr=1e-2))
        assert conversions.of(both) is optimizer
        trained(first, second, optimizer)
        whole = conversions.state_dict(first), conversions.state_dict(second, wanted=True)
        conversions.close()
        return first, second, *whole

    first, second = network(), nn.Linear(2, 2)
    models = [copy.deepcopy((first, second)) for _ in range(2)]
    trained(first, second, torch.optim.AdamW([*second.parameters(), *first.parameters()], lr=1e-2))
    for rank, (ours, more, whole, of_each) in enumerate(on_threads(2, program, timeout=BOUND)):
        assert_same_model(ours, first)
        assert_same_model(more, second)
        assert set(whole) == (set() if rank else set(ours.state_dict()))
        assert_same_dict(of_each, second.state_dict())


def test_gradients_of_ignored_parts_are_each_ranks_own_before_an_optimizer_is_set_up_and_beside_another_model() -> None:
    first, second = network(), nn.Linear(2, 2)
    conversions = Conversions({"ignored": iter([first[0], second.bias])}, "X", "set it up")
    conversions.add(first)
    conversions.add(second)
    first[2].requires_grad_(False)
    second.weight.requires_grad_(False)
    backward(nn.Sequential(first, second))
    first.zero_grad()
    second.zero_grad()
    for model, listed in ((first, first[2].requires_grad_(True).parameters()), (second, [second.weight])):
        optimizer = conversions.convert(torch.optim.SGD(listed, lr=0.1))
        assert len(optimizer.param_groups[0]["params"]) == 3 - len(conversions.optimizers)
        backward(first if model is first else nn.Sequential(first, second))
    conversions.close()
    assert first[0].weight.grad is not None
    with pytest.raises(TypeError, match=r"ignored\[0\] is a str"):
        Conversions({"ignored": "name"}, "X", "set it up").add(first)


def test_one_optimizer_of_two_models_takes_no_precision_by_names() -> None:
    bf16 = MixedPrecision(torch.bfloat16)
    for precision in ({"*": bf16, "0": bf16}, lambda name, module: bf16):
        models = network(), network()
        conversions = Conversions({"mixed_precision": precision}, "X", "set it up")
        for model in models:
            conversions.add(model)
        both = [parameter for model in models for parameter in model.parameters()]
        with pytest.raises(ValueError, match="give one MixedPrecision for all of them, or set up"):
            conversions.convert(torch.optim.AdamW(both))
        conversions.convert(torch.optim.AdamW(models[0].parameters()))
        conversions.close()


# -- accelerate --------------------------------------------------------------------------------------------------------


def test_a_prepared_model_needs_a_prepared_optimizer_unless_it_is_for_evaluation(
    accelerator_class: Any,
) -> None:
    accelerator = accelerator_class(cpu=True)
    backward(accelerator.prepare_model(network(), evaluation_mode=True))
    model = accelerator.prepare(network())
    for call in (accelerator.backward, torch.Tensor.backward):
        with pytest.raises(
            RuntimeError, match=r"'2.bias' of the Sequential.*: prepare the optimizer that has it, as in"
        ):
            call(model(torch.ones(2, 3)).sum())


def test_a_loader_of_a_sampler_that_has_dealt_stays_as_it_is(accelerator_class: Any) -> None:
    from accelerate import skip_first_batches

    data = TensorDataset(torch.arange(14))
    samplers = [MicroBatchSampler(data, 2, 0, 1) for _ in range(2)]
    accelerator = accelerator_class(cpu=True)
    plain, prepared = (DataLoader(data, batch_sampler=sampler) for sampler in samplers)
    prepared = accelerator.prepare(prepared)
    assert accelerator.prepare(prepared) is prepared

    def dealt(loader: Any) -> list[list[int]]:
        return [batch.tolist() for (batch,) in loader]

    for set_epoch, epoch in ((None, 0), (None, 0), (samplers[1].set_epoch, 5), (prepared.set_epoch, 3)):
        for set_it in (samplers[0].set_epoch, set_epoch) if set_epoch else ():
            set_it(epoch)  # one whose epoch is not set deals the same one again
        assert dealt(prepared) == dealt(plain)
    for sampler in samplers:
        sampler.set_epoch(2, start=3)
    assert len(prepared) == 4
    assert dealt(skip_first_batches(prepared, 1)) == dealt(plain)[1:]
    whole = [sample for (batch,) in prepared for sample in accelerator.gather_for_metrics(batch).tolist()]
    assert len(whole) == 8  # none of the last is taken for a repeated one


def by_rank(data: Any) -> Any:
    return DistributedSampler(data, num_replicas=1, rank=0)


@pytest.mark.parametrize(
    ("words", "loader"),
    [
        ("DistributedSampler has dealt", lambda data: DataLoader(data, 2, sampler=by_rank(data))),
        (
            "DistributedSampler has dealt",
            lambda data: DataLoader(data, batch_sampler=BatchSampler(by_rank(data), 2, False)),
        ),
        ("MicroBatchSampler has dealt", lambda data: DataLoader(data, None, sampler=MicroBatchSampler(data, 2, 0, 1))),
        ("is expected", lambda data: DataLoader(data, batch_sampler=MicroBatchSampler(data, 2, 1, 2))),
    ],
)
def test_a_loader_that_would_be_dealt_out_twice_is_refused(
    accelerator_class: Any, words: str, loader: Callable[[Any], Any]
) -> None:
    with pytest.raises(ValueError, match=f"ZeroAccelerator.* {words}"):
        accelerator_class(cpu=True).prepare(loader(TensorDataset(torch.arange(8))))
