"""The public interface: the optimizer is a torch.optim.Optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer
from zero.config import ShardingOptions

from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_model, plain_step, share
from ..support.programs import locked_build
from ..support.trainings import ALL_STAGES, Counting, Two, trained

pytestmark = pytest.mark.contract


def test_every_option_of_the_record_is_an_argument_with_the_same_default() -> None:
    arguments = inspect.signature(ZeroOptimizer).parameters
    options = {option.name: option.default for option in fields(ShardingOptions)}
    assert options == {name: arguments[name].default for name in options}
    described = inspect.getdoc(ZeroOptimizer) or ""
    assert all(f"\n    {name}: " in described for name in options)
    assert ShardingOptions().arguments() == options


@ALL_STAGES
@pytest.mark.by_default("2")
def test_groups_schedulers_hooks_and_closures_work_as_in_torch(stage: int) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]

    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, divisor: float
    ) -> list[str]:
        events: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
        optimizer.register_step_post_hook(lambda *_: events.append("post"))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = torch.zeros(())
                for batch in share(odd_batches(6, step), rank, world_size):
                    loss = odd_loss(model, batch)
                    loss.backward()
                if world_size == 1 and divisor != 1:
                    for p in model.parameters():
                        if p.grad is not None:
                            p.grad.div_(divisor)
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
            scheduler.step()
            optimizer.param_groups[1]["weight_decay"] = 0.01 * step
        return events

    def program(transport: Transport) -> nn.Module:
        model = locked_build(0)
        arguments: dict[str, Any] = {"stage": stage, "module": model, "divisor": 6, "partition": "element"}
        optimizer = ZeroOptimizer(groups(model), process_group=transport, **arguments)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups[0]["params"][0] is next(p for p in model.parameters() if p.dim() > 1)
        assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
        assert loop(model, optimizer, transport.rank, 3, 1) == ["pre", "post"] * 4
        return model

    plain = locked_build(0)
    loop(plain, torch.optim.AdamW(groups(plain)), 0, 1, 6)
    for model in on_threads(3, program):
        assert_same_model(model, plain)


@ALL_STAGES
@pytest.mark.by_default("2")
def test_a_class_that_counts_in_its_group_counts_steps_not_buckets(stage: int) -> None:
    def program(transport: Transport) -> tuple[nn.Module, Any]:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, Counting, stage=stage, process_group=transport, bucket_cap_mb=1e-6, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            odd_loss(model, odd_batches(2, step)[transport.rank]).backward()
            optimizer.step()
        return model, optimizer.param_groups[0]["k"]

    plain = locked_build(0)
    sgd = Counting(plain.parameters(), lr=0.1)
    for step in range(3):
        sgd.zero_grad()
        plain_step(plain, sgd, odd_loss, odd_batches(2, step), 2)
    for model, count in on_threads(2, program):
        assert count == 3
        assert_same_model(model, plain)


@ALL_STAGES
@pytest.mark.by_default("2")
def test_add_param_group_after_some_steps(stage: int) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step_of: Callable[[int], None]) -> None:
        step_of(0)
        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
        step_of(1)
        step_of(2)

    def program(transport: Transport) -> nn.Module:
        model = locked_build(transport.rank)
        names = {id(p) for p in model.last.parameters()}
        first = [p for p in model.parameters() if id(p) not in names]
        optimizer = ZeroOptimizer(
            first, torch.optim.Adam, stage=stage, module=model, process_group=transport, lr=1e-2, bucket_cap_mb=0.0005
        )

        def step_of(step: int) -> None:
            model.zero_grad()
            odd_loss(model, odd_batches(2, step)[transport.rank]).backward()
            optimizer.step()

        loop(model, optimizer, step_of)
        optimizer.check_replicas()
        assert sum(len(b.names) for b in optimizer.describe().buckets) == len(list(model.parameters()))
        return model

    plain = locked_build(0)
    names = {id(p) for p in plain.last.parameters()}
    adam = torch.optim.Adam([p for p in plain.parameters() if id(p) not in names], lr=1e-2)

    def plain_step_of(step: int) -> None:
        plain.zero_grad()
        plain_step(plain, adam, odd_loss, odd_batches(2, step), 2)

    loop(plain, adam, plain_step_of)
    for model in on_threads(2, program):
        assert_same_model(model, plain)


@ALL_STAGES
@pytest.mark.by_default("1")
def test_several_optimizers_with_different_settings_live_side_by_side(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = locked_build(0)
        mine = set(model.first.parameters()) | set(model.last.parameters())
        one = ZeroOptimizer(
            [p for p in model.parameters() if p in mine], torch.optim.SGD, stage=stage, process_group=transport, lr=0.1
        )
        two = ZeroOptimizer(
            [p for p in model.parameters() if p not in mine],
            torch.optim.Adam,
            stage=(stage + 1) % 3,
            process_group=transport,
            bucket_cap_mb=1e-6,
            lr=1e-2,
        )
        for step in range(3):
            odd_loss(model, odd_batches(2, step, extra=False)[transport.rank]).backward()
            for optimizer in (two, one) if step % 2 else (one, two):
                optimizer.step()
                optimizer.zero_grad()
        return model

    plain = locked_build(0)
    mine = set(plain.first.parameters()) | set(plain.last.parameters())
    sgd = torch.optim.SGD([p for p in plain.parameters() if p in mine], lr=0.1)
    adam = torch.optim.Adam([p for p in plain.parameters() if p not in mine], lr=1e-2)
    for step in range(3):
        plain_step(plain, sgd, odd_loss, odd_batches(2, step, extra=False), 2)
        adam.step()
        plain.zero_grad()
    for model in on_threads(2, program):
        assert_same_model(model, plain)


@ALL_STAGES
@pytest.mark.by_default("2")
def test_every_call_but_step_and_loads_leaves_the_next_update_alone(stage: int) -> None:
    def program(transport: Transport, curious: bool) -> nn.Module:
        model, optimizer = trained(transport, stage)
        if curious:
            state = torch.random.get_rng_state()
            str(optimizer.describe()), repr(optimizer), optimizer.traffic, len(optimizer.state)
            optimizer.check_replicas()
            optimizer.full_grad(model.last.weight)
            optimizer.full_grad(model.unused)
            optimizer.clip_grad_norm_(float("inf"))
            optimizer.consolidate_state_dict(1)
            with optimizer.gathered(), optimizer.gathered(model.one, write=True):
                model.state_dict()
            with torch.no_grad():
                odd_loss(model, odd_batches(1, 5)[0])
            copy.deepcopy(model)
            optimizer.full_grad(model.last.weight)
            optimizer.exchange(b"hello")
            ZeroOptimizer(locked_build(3), process_group=transport)
            assert torch.equal(state, torch.random.get_rng_state())
        optimizer.step()
        return model

    curious = on_threads(2, lambda transport: program(transport, True))
    for model, other in zip(curious, on_threads(2, lambda transport: program(transport, False)), strict=True):
        assert_same_model(model, other)


@ALL_STAGES
@pytest.mark.by_default("2")
def test_edits_inside_gathered_become_rank_0s_on_every_rank(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, stage)
        with optimizer.gathered(write=True), torch.no_grad():
            model.last.weight.fill_(transport.rank + 1)
            model.turned.add_(transport.rank)
        with optimizer.gathered([model.one, model.turned], write=True), torch.no_grad():
            model.one.fill_(transport.rank + 7)
        assert bool((model.last.weight == 1).all())
        assert bool((model.one == 7).all())
        optimizer.check_replicas()
        with (
            pytest.raises(ValueError, match="is not one of this optimizer's parameters"),
            optimizer.gathered(torch.ones(1)),
        ):
            pass
        return model

    on_threads(3, program)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default("2", "3")
def test_gathered_reaches_the_modules_parameters_that_are_not_listed(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = locked_build(0)
        listed = model.first.weight
        optimizer = ZeroOptimizer([listed], module=model, stage=stage, process_group=transport, lr=0.1)
        for chosen, edited in ((None, [model.one, listed]), (model.one, [model.one]), ([model.turned, listed],) * 2):
            with optimizer.gathered(chosen, write=True), torch.no_grad():
                for parameter in edited:
                    parameter.add_(transport.rank + 1)
        optimizer.close()
        return model

    first, *others = on_threads(3, program)
    plain = locked_build(0)
    with torch.no_grad():
        for parameter, times in ((plain.one, 2), (plain.turned, 1), (plain.first.weight, 2)):
            for _ in range(times):
                parameter.add_(1)
    assert_same_model(first, plain)
    for other in others:
        assert_same_model(other, first)


def test_construction_copies_rank_0s_parameters_and_buffers() -> None:
    def program(transport: Transport) -> nn.Module:
        model = locked_build(transport.rank)
        model.count = nn.Buffer(torch.tensor(transport.rank))
        other = nn.BatchNorm1d(3)
        other.running_mean += transport.rank
        model.norm = other
        ZeroOptimizer(list(model.last.parameters()), module=model, process_group=transport)
        assert model.count == 0
        assert bool((model.norm.running_mean == 0).all())
        return model

    for model in on_threads(3, program):
        assert_same_bits(model.offset, locked_build(0).offset)
        for name, parameter in model.named_parameters():
            if not name.startswith("norm"):
                assert_same_bits(parameter, locked_build(0).get_parameter(name))


@ALL_STAGES
def test_identity_names_ties_shapes_and_strides_stay(stage: int) -> None:
    model = locked_build(0)
    before = {name: (p, p.shape, p.stride()) for name, p in model.named_parameters(remove_duplicate=False)}
    optimizer = ZeroOptimizer(model, stage=stage)
    odd_loss(model, odd_batches(1)[0]).backward()
    optimizer.step()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    for name, (p, shape, stride) in before.items():
        assert after[name] is p
        assert (p.shape, p.stride()) == (shape, stride)
    assert model.head.weight is model.embed.weight


@ALL_STAGES
def test_edits_from_outside_between_steps_are_honoured(stage: int) -> None:
    def edit(model: nn.Module) -> None:
        with torch.no_grad():
            model.last.weight.mul_(0.5)
        model.load_state_dict({**model.state_dict(), "one": torch.full((1,), 3.0)})
        model.first.bias.data[2] = 9

    def program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, stage, 1)
        edit(model)
        optimizer.step()
        return model

    plain = locked_build(0)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain_step(plain, adamw, odd_loss, odd_batches(2, 0), 2)
    adamw.zero_grad()
    for batch in odd_batches(2, 1):
        odd_loss(plain, batch).backward()
    for p in plain.parameters():
        if p.grad is not None:
            p.grad.div_(2)
    edit(plain)
    adamw.step()
    for model in on_threads(2, program):
        assert_same_model(model, plain)


# -- earlier bugs, found by reading and by random programs -------------------------------------------------------------


class CountingItself(torch.optim.SGD):
    """An optimizer that counts its steps in an attribute."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.count)


@ALL_STAGES
@pytest.mark.parametrize("cls", [Counting, CountingItself])
@pytest.mark.by_default("Counting-2", "CountingItself-0")
def test_a_class_counts_steps_also_on_ranks_and_in_groups_that_hold_nothing(
    stage: int, cls: type[torch.optim.Optimizer]
) -> None:
    def groups(model: Two) -> list[dict[str, Any]]:
        return [{"params": [model.a]}, {"params": [model.b]}]

    def program(transport: Transport) -> tuple[nn.Module, list[Any]]:
        model = Two()
        optimizer = ZeroOptimizer(
            groups(model), cls, stage=stage, module=model, process_group=transport, bucket_cap_mb=1e-6, lr=0.1
        )
        for step in range(3):
            optimizer.zero_grad()
            model(1.0 + step, step == 2).backward()
            optimizer.step()
        return model, [group.get("k") for group in optimizer.param_groups]

    plain = Two()
    sgd = cls(groups(plain), lr=0.1)  # type: ignore[call-arg]
    for step in range(3):
        sgd.zero_grad()
        for _ in range(8):
            plain(1.0 + step, step == 2).backward()
        for p in plain.parameters():
            if p.grad is not None:
                p.grad.div_(8)
        sgd.step()
    for model, counts in on_threads(8, program, timeout=10):
        assert counts == [group.get("k") for group in sgd.param_groups]
        assert_same_model(model, plain)


class CountingWhatItHas(torch.optim.SGD):
    """An optimizer that counts the steps of each group with a gradient, and edits a tensor among its options."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["k"] = group.get("k", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad * (group["decay"] / group["k"]))
                group["decay"].mul_(0.5)


@ALL_STAGES
def test_what_a_class_does_to_a_group_it_does_once_whatever_bucket_the_group_is_in(stage: int) -> None:
    def groups(model: Two) -> list[dict[str, Any]]:
        return [{"params": [p], "decay": torch.tensor(0.1)} for p in (model.a, model.b)]

    ours, plain = Two(), Two()
    given, theirs = groups(ours), groups(plain)
    zero = ZeroOptimizer(
        given, CountingWhatItHas, stage=stage, module=ours, process_group=solo(), bucket_cap_mb=1e-6, lr=0.1
    )
    sgd = CountingWhatItHas(theirs, lr=0.1)
    for step in range(3):
        for model, optimizer in ((ours, zero), (plain, sgd)):
            optimizer.zero_grad()
            model(1.0 + step, step != 1).backward()
            optimizer.step()
    assert [group.get("k") for group in zero.param_groups] == [group.get("k") for group in sgd.param_groups]
    for group, other in zip(given, theirs, strict=True):
        assert_same_bits(group["decay"], other["decay"])  # the user's own tensor
    zero.close()
    assert_same_model(ours, plain)


@ALL_STAGES
def test_a_further_group_is_counted_on_from_where_the_others_are(stage: int) -> None:
    ours, plain = Two(), Two()
    zero = ZeroOptimizer([ours.a], CountingItself, stage=stage, module=ours, process_group=solo(), lr=0.1)
    sgd = CountingItself([plain.a], lr=0.1)
    for step in range(3):
        for model, optimizer in ((ours, zero), (plain, sgd)):
            if step == 2:
                optimizer.add_param_group({"params": [model.b]})
            optimizer.zero_grad()
            model(1.0 + step, True).backward()
            optimizer.step()
    zero.close()
    assert_same_model(ours, plain)


def test_parameters_without_dimensions_are_promoted_as_torch_promotes_them() -> None:
    model, plain = nn.ParameterList([torch.tensor(0.3)]), nn.ParameterList([torch.tensor(0.3)])
    arguments = {"lr": torch.tensor(0.1, dtype=torch.float64)}
    optimizer = ZeroOptimizer(model, partition="element", **arguments)
    adamw = torch.optim.AdamW(plain.parameters(), **arguments)
    for step in range(20):
        for parameters, steps in ((model, optimizer), (plain, adamw)):
            steps.zero_grad()
            (parameters[0].sin() * (step + 1) / 3).backward()
            steps.step()
        assert_same_bits(model[0], plain[0], f"step {step}")


def test_sets_len_zero_modules_and_required_arguments() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def __len__(self) -> int:
            return 0

    class Required(Counting):
        def __init__(self, params: Any, *, lr: float) -> None:
            super().__init__(params, lr=lr)

    module = Empty()
    assert ZeroOptimizer(module, Required, lr=0.1).describe().buckets[0].names == ("w",)
    with pytest.raises(TypeError, match="a set has none"):
        ZeroOptimizer(set(module.parameters()))
    with pytest.raises(TypeError, match="a set has none"):
        ZeroOptimizer([{"params": set(module.parameters())}])
    module.offset = nn.Buffer(torch.zeros(1).expand(4))
    with pytest.raises(ValueError, match="buffer 'offset' overlaps itself"):
        ZeroOptimizer(module)
