"""The public face: it is a torch.optim.Optimizer, and p.grad is right or loud."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives import CollectiveError, Loopback, Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_
from zero.hooks import ShardedGradient

from .models import odd_batches, odd_loss
from .plain import assert_same_bits, assert_same_model, assert_same_states, plain_step, share
from .programs import locked_build

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
SHARDED = pytest.mark.parametrize("stage", [1, 2])


def trained(transport: Transport, stage: int, steps: int = 1, **arguments: Any) -> tuple[nn.Module, ZeroOptimizer]:
    """A rank that has run a backward of the next step after ``steps`` whole ones."""
    model = locked_build(0)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, bucket_cap_mb=0.0005, lr=1e-2, **arguments)
    for step in range(steps + 1):
        odd_loss(model, odd_batches(transport.world_size, step)[transport.rank]).backward()
        if step < steps:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


READS: dict[str, Callable[[Tensor], Any]] = {
    "torch.nn.utils.clip_grad_norm_": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0),
    "torch.nn.utils.clip_grad_value_": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0),
    "norm": lambda p: p.grad.norm(),
    "add": lambda p: p.grad + 1,
    "add_ from outside": lambda p: p.grad.add_(1),
    "mul_": lambda p: p.grad.mul_(0.5),
    "copy_": lambda p: p.grad.copy_(p),
    "index": lambda p: p.grad[0],
    "item": lambda p: p.grad.sum().item(),
    "isnan": lambda p: torch.isnan(p.grad).any(),
    "numpy": lambda p: p.grad.numpy(),
    "tolist": lambda p: p.grad.tolist(),
    "clone": lambda p: p.grad.clone(),
    "data": lambda p: p.grad.data.sum(),
    "to": lambda p: p.grad.to(torch.float64),
    "data_ptr": lambda p: p.grad.data_ptr(),
    "storage": lambda p: p.grad.untyped_storage(),
    "view": lambda p: p.grad.view(-1),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "stack": lambda p: torch.stack([p.grad]),
    "foreach": lambda p: torch._foreach_norm([p.grad]),
    "another optimizer": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "another optimizer, foreach": lambda p: torch.optim.SGD([p], lr=0.1, foreach=True).step(),
}


@SHARDED
@pytest.mark.parametrize("read", READS)
def test_every_read_of_a_sharded_gradient_raises_and_names_the_remedy(stage: int, read: str) -> None:
    model, optimizer = trained(solo_transport(), stage)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        READS[read](model.first.weight)
    assert "'first.weight'" in str(caught.value)
    assert "optimizer.clip_grad_norm_" in str(caught.value)
    assert "optimizer.full_grad" in str(caught.value)
    for p, old in zip(model.parameters(), before, strict=True):
        assert_same_bits(p, old)
    assert optimizer.full_grad(model.first.weight) is not None


def solo_transport() -> Transport:
    from collectives import solo

    return solo()


@SHARDED
def test_a_placeholder_looks_like_the_gradient_and_prints_what_it_is(stage: int) -> None:
    model, _ = trained(solo_transport(), stage)
    gradient = model.turned.grad
    assert isinstance(gradient, ShardedGradient)
    assert gradient.shape == model.turned.shape
    assert gradient.stride() == model.turned.stride()
    assert gradient.dtype == model.turned.dtype
    assert "gradient of 'turned'" in repr(gradient)


@ALL_STAGES
def test_a_gradient_is_never_none_after_a_backward_unless_no_rank_used_the_parameter(stage: int) -> None:
    def program(transport: Transport) -> list[bool]:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport)
        odd_loss(model, (odd_batches(1)[0][0], transport.rank == 1)).backward()  # rank 1 alone uses `sometimes`
        assert optimizer.world_size == 3
        return [model.sometimes.weight.grad is None, model.last.weight.grad is None]

    assert on_threads(3, program) == [[False, False]] * 3


def test_stage_0_shows_the_mean_gradient_after_each_backward() -> None:
    def program(transport: Transport) -> None:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=0, process_group=transport, bucket_cap_mb=0.0005)
        optimizer.divisor = 5
        plain = locked_build(0)
        sums: dict[str, Tensor] = {}
        for round_ in range(3):
            odd_loss(model, odd_batches(2, round_)[transport.rank]).backward()
            for batch in odd_batches(2, round_):
                plain.zero_grad()
                odd_loss(plain, batch).backward()
                for name, p in plain.named_parameters():
                    if p.grad is not None:
                        sums[name] = sums[name] + p.grad if name in sums else p.grad
            for name, p in model.named_parameters():
                assert (p.grad is None) == (name not in sums), name
                if name in sums:
                    assert type(p.grad) is Tensor
                    assert_same_bits(p.grad, sums[name] / 5, name)

    on_threads(2, program)


def test_stage_0_means_are_loud_while_they_are_not_true() -> None:
    def program(transport: Transport) -> None:
        model, optimizer = trained(transport, 0)
        assert type(model.last.weight.grad) is Tensor
        with optimizer.no_sync():
            odd_loss(model, odd_batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match="not reduced yet"):
            model.last.weight.grad.sum()
        odd_loss(model, odd_batches(1)[0]).backward()
        before = model.last.weight.grad.clone()
        optimizer.divisor = 8
        with pytest.raises(RuntimeError, match=r"last\.weight"):
            model.last.weight.grad.sum()
        optimizer.clip_grad_norm_(float("inf"))
        assert_same_bits(model.last.weight.grad, before / 4)  # 2 ranks before, 8 now: both powers of two

    on_threads(2, program)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("clipped", [False, True])
def test_stage_0_honours_edits_of_the_mean(world_size: int, clipped: bool) -> None:
    def edit(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model.one.grad = model.one.grad * 2
        model.scale.grad = None

    def program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, 0, 0)
        if clipped:
            optimizer.clip_grad_norm_(0.5)
        edit(model)
        optimizer.step()
        return model

    plain = locked_build(0)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in odd_batches(world_size, 0):
        odd_loss(plain, batch).backward()
    for p in plain.parameters():
        if p.grad is not None:
            p.grad.div_(world_size)
    if clipped:
        clip_grad_norm_(plain.parameters(), 0.5)
    edit(plain)
    adamw.step()
    for model in on_threads(world_size, program):
        assert_same_model(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("then", ["backward", "divisor"])
def test_stage_0_refuses_to_lose_an_edit_of_the_mean(world_size: int, then: str) -> None:
    def program(transport: Transport) -> str:
        model, optimizer = trained(transport, 0, 0)
        model.last.weight.grad.mul_(3)
        model.last.weight.grad = model.last.weight.grad * 2
        if then == "divisor":
            optimizer.divisor = 7
        go_on = odd_loss(model, odd_batches(1)[0]).backward if then == "backward" else optimizer.step
        with pytest.raises(RuntimeError) as caught:
            go_on()
        return str(caught.value)

    for message in on_threads(world_size, program, timeout=5):
        assert "the gradient of 'last.weight' was edited" in message


@ALL_STAGES
@pytest.mark.parametrize("when", ["before the first backward", "between backwards", "after clip"])
def test_a_gradient_of_the_users_is_loud_where_it_cannot_count(stage: int, when: str) -> None:
    if stage == 0 and when != "before the first backward":
        return  # the mean is there, and may be replaced

    def program(transport: Transport) -> str:
        model, optimizer = trained(transport, stage, 0)
        if when == "before the first backward":
            optimizer.zero_grad()
        if when == "after clip":
            optimizer.clip_grad_norm_(1.0)
        model.last.weight.grad = torch.ones_like(model.last.weight)
        go_on = optimizer.step if when == "after clip" else odd_loss(model, odd_batches(1)[0]).backward
        with pytest.raises(RuntimeError) as caught:
            go_on()
        return str(caught.value)

    for message in on_threads(2, program, timeout=5):
        assert "the gradient of 'last.weight' was assigned from outside" in message


@ALL_STAGES
def test_autograd_grad_between_backwards_changes_nothing(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, lr=1e-2)
        for round_ in range(2):
            loss = odd_loss(model, odd_batches(2, round_)[transport.rank])
            torch.autograd.grad(loss, [model.last.weight, model.first.weight], retain_graph=True)
            loss.backward()
            shown = model.last.weight.grad
            torch.autograd.grad(odd_loss(model, odd_batches(1, 9)[0]), list(model.last.parameters()))
            assert model.last.weight.grad is shown
        optimizer.step()
        return model

    plain = locked_build(0)
    plain_step(
        plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), odd_loss, [*odd_batches(2, 0), *odd_batches(2, 1)], 2
    )
    for model in on_threads(2, program):
        assert_same_model(model, plain)


@ALL_STAGES
def test_two_losses_retained_graphs_and_created_graphs_count_once_each(stage: int) -> None:
    def backwards(model: nn.Module, rank: int) -> None:
        loss = odd_loss(model, odd_batches(2)[rank])
        loss.backward(retain_graph=True)
        loss.backward()
        (odd_loss(model, odd_batches(2, 1)[rank]) + model.one.sum()).backward(create_graph=True)

    def program(transport: Transport) -> nn.Module:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.1)
        backwards(model, transport.rank)
        optimizer.divisor = 6
        optimizer.step()
        return model

    plain = locked_build(0)
    sums: dict[str, Tensor] = {}
    for round_ in range(3):  # backward i of rank r is contribution i * W + r
        for rank in range(2):
            plain.zero_grad()
            loss = odd_loss(plain, odd_batches(2, round_ // 2)[rank])
            (loss if round_ < 2 else loss + plain.one.sum()).backward()
            for name, p in plain.named_parameters():
                if p.grad is not None:
                    sums[name] = sums[name] + p.grad if name in sums else p.grad
    for name, p in plain.named_parameters():
        p.grad = sums[name] / 6 if name in sums else None
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for model in on_threads(2, program):
        assert_same_model(model, plain)


@ALL_STAGES
def test_checkpointed_models_are_exact(stage: int) -> None:
    from torch.utils.checkpoint import checkpoint

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        hidden = checkpoint(model.first, model.embed(batch[0]), use_reentrant=False)
        return checkpoint(lambda x: model.head(model.last(x)), hidden, use_reentrant=False).square().mean()

    def program(transport: Transport) -> nn.Module:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, lr=1e-2)
        loss_of(model, odd_batches(2)[transport.rank]).backward()
        optimizer.step()
        return model

    plain = locked_build(0)
    plain_step(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), loss_of, odd_batches(2), 2)
    for model in on_threads(2, program):
        assert_same_model(model, plain)


@ALL_STAGES
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
        optimizer = ZeroOptimizer(groups(model), stage=stage, module=model, process_group=transport, divisor=6)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups[0]["params"][0] is next(p for p in model.parameters() if p.dim() > 1)
        assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
        assert loop(model, optimizer, transport.rank, 3, 1) == ["pre", "post"] * 4
        return model

    plain = locked_build(0)
    loop(plain, torch.optim.AdamW(groups(plain)), 0, 1, 6)
    for model in on_threads(3, program):
        assert_same_model(model, plain)


class Counting(torch.optim.SGD):
    """A class that keeps a number in its group, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


@ALL_STAGES
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
def test_full_grad_is_the_plain_mean_before_and_after_clipping(stage: int) -> None:
    def program(transport: Transport) -> list[list[Tensor | None]]:
        model, optimizer = trained(transport, stage, 0)
        before = [optimizer.full_grad(p) for p in model.parameters()]
        optimizer.clip_grad_norm_(0.1)
        return [before, [optimizer.full_grad(p) for p in model.parameters()]]

    plain = locked_build(0)
    for batch in odd_batches(3, 0):
        odd_loss(plain, batch).backward()
    for p in plain.parameters():
        if p.grad is not None:
            p.grad.div_(3)
    expected = [[None if p.grad is None else p.grad.clone() for p in plain.parameters()]]
    clip_grad_norm_(plain.parameters(), 0.1)
    expected.append([p.grad for p in plain.parameters()])
    for results in on_threads(3, program):
        for ours, theirs in zip(results, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert_same_bits(a, b)
                    assert a.stride() == b.stride() or a.numel() < 2


@ALL_STAGES
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
def test_states_are_this_ranks_pieces_and_live(stage: int) -> None:
    def program(transport: Transport) -> dict[str, int]:
        model, optimizer = trained(transport, stage, 2)
        found = {}
        for name, p in model.named_parameters():
            state = optimizer.state[p]
            found[name] = state["exp_avg"].numel() if state else 0
            if state:
                assert state["step"] == 2
                state["exp_avg"].fill_(3)
                assert bool((optimizer.state[p]["exp_avg"] == 3).all())
                state["exp_avg"].zero_()
                assert not optimizer.state[p]["exp_avg"].any()
                if stage == 0:
                    assert state["exp_avg"].shape == p.shape
        assert len(optimizer.state) == sum(1 for p in model.parameters() if optimizer.state[p])
        return found

    totals = on_threads(3, program)
    for name, p in locked_build(0).named_parameters():
        idle = name in ("frozen", "unused") or name.startswith("layers.2")
        expected = 0 if idle or p.numel() == 0 else p.numel()
        assert sum(found[name] for found in totals) == expected * (3 if stage == 0 else 1), name


@ALL_STAGES
def test_before_the_first_step_there_is_no_state(stage: int) -> None:
    model = locked_build(0)
    optimizer = ZeroOptimizer(model, stage=stage)
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.describe().bytes["optimizer"] == 0


@ALL_STAGES
def test_close_makes_the_model_plain_again(stage: int) -> None:
    def program(transport: Transport) -> None:
        model, optimizer = trained(transport, stage)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.close()
        optimizer.close()
        for name, p in model.named_parameters():
            assert_same_bits(p, before[name])
            assert p.stride() == before[name].stride()
            assert p.untyped_storage().nbytes() == p.numel() * 4
            assert not isinstance(p.grad, ShardedGradient)
            p.grad = None
        odd_loss(model, odd_batches(1)[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    on_threads(2, program)


def test_hooks_do_not_keep_the_optimizer_and_a_deep_copy_is_free() -> None:
    model = locked_build(0)
    optimizer = ZeroOptimizer(model)
    copied = copy.deepcopy(model)
    odd_loss(copied, odd_batches(1)[0]).backward()
    assert type(copied.last.weight.grad) is Tensor
    assert model.last.weight.grad is None
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    odd_loss(model, odd_batches(1)[0]).backward()
    assert type(model.last.weight.grad) is Tensor


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


# -- found by reading and by random programs; each was wrong once ------------------------------------------------------


class Two(nn.Module):
    """``a`` is used where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(32.0))
        self.b = nn.Parameter(torch.arange(40.0) / 7)

    def forward(self, scale: float, use_a: bool = True) -> Tensor:
        loss = (self.b * scale).square().sum()
        return loss + (self.a * scale).square().sum() if use_a else loss


SGD = torch.optim.SGD


@ALL_STAGES
@pytest.mark.parametrize("clear", ["zeros", "module zeros", "none", "zero_grad"])
def test_a_gradient_that_one_rank_alone_held_does_not_survive_a_clear(stage: int, clear: str) -> None:
    from .programs import Step
    from .programs import clear as clear_as

    def program(transport: Transport) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, stage=stage, process_group=transport, bucket_cap_mb=1e-6, lr=0.1)
        with optimizer.no_sync():
            model(1.0, transport.rank == 0).backward()
        optimizer.clip_grad_norm_(float("inf"))
        model.a.requires_grad_(False)
        clear_as(model, optimizer, Step(clear=clear))
        model.a.requires_grad_(True)
        model(3.0).backward()
        optimizer.step()
        return model

    plain = Two()
    sgd = SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(3.0).backward()
    for p in plain.parameters():
        p.grad.div_(2)  # type: ignore[union-attr]
    sgd.step()
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


@ALL_STAGES
def test_clearing_one_gradient_of_a_divergent_graph_leaves_the_others(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, stage=stage, process_group=transport, lr=0.1)
        model(1.0, transport.rank == 0).backward()
        model.a.grad = None
        model(2.0).backward()
        optimizer.step()
        return model

    plain = Two()
    plain(1.0, True).backward()
    plain(1.0, False).backward()
    plain.a.grad = None
    for _ in range(2):
        plain(2.0).backward()
    for p in plain.parameters():
        p.grad.div_(2)  # type: ignore[union-attr]
    SGD(plain.parameters(), lr=0.1).step()
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_stage_0_zeroes_means_that_it_does_not_show(world_size: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, stage=0, process_group=transport, lr=0.1)
        model(1.0).backward()
        optimizer.divisor = 5
        optimizer.zero_grad(set_to_none=False)
        optimizer.consolidate_state_dict()
        model(2.0).backward()
        optimizer.step()
        return model

    plain = Two()
    for _ in range(world_size):
        plain(2.0).backward()
    for p in plain.parameters():
        p.grad.div_(5)  # type: ignore[union-attr]
    SGD(plain.parameters(), lr=0.1).step()
    for model in on_threads(world_size, program, timeout=5):
        assert_same_model(model, plain)


class CountingItself(torch.optim.SGD):
    """A class that counts its steps in itself."""

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


def test_parameters_without_dimensions_are_promoted_as_torch_promotes_them() -> None:
    model, plain = nn.ParameterList([torch.tensor(0.3)]), nn.ParameterList([torch.tensor(0.3)])
    arguments = {"lr": torch.tensor(0.1, dtype=torch.float64)}
    optimizer, adamw = ZeroOptimizer(model, **arguments), torch.optim.AdamW(plain.parameters(), **arguments)
    for step in range(20):
        for parameters, steps in ((model, optimizer), (plain, adamw)):
            steps.zero_grad()
            (parameters[0].sin() * (step + 1) / 3).backward()
            steps.step()
        assert_same_bits(model[0], plain[0], f"step {step}")


def test_a_gradient_that_a_hook_changes_after_it_was_handed_over_is_loud() -> None:
    """torch's documentation asks hooks not to do so; where autograd gave one tensor to two parameters it would show."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = ZeroOptimizer([a, b], SGD, lr=0.1)

    def doubled(gradient: Tensor) -> None:
        gradient.mul_(2)

    b.register_hook(doubled)
    (a + b).square().sum().backward()
    loss = (a + b).square().sum()
    with pytest.raises(RuntimeError, match="modified in place after autograd had handed it over"):
        loss.backward()
    optimizer.zero_grad()


def test_an_optimizer_can_be_built_again_over_the_same_model_and_the_old_one_says_so() -> None:
    model = locked_build(0)
    old = ZeroOptimizer(model, SGD, lr=0.1)
    odd_loss(model, odd_batches(1)[0]).backward()
    new = ZeroOptimizer(model, SGD, lr=0.1)
    odd_loss(model, odd_batches(1)[0]).backward()
    new.step()
    plain = locked_build(0)
    plain_step(plain, SGD(plain.parameters(), lr=0.1), odd_loss, odd_batches(1), 1)
    assert_same_model(model, plain)
    with pytest.raises(RuntimeError, match="a newer ZeroOptimizer took over"):
        old.step()


@ALL_STAGES
def test_nothing_waits_for_the_garbage_collector(stage: int) -> None:
    gc.collect()
    gc.disable()
    try:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=stage)
        activations = []
        for _ in range(3):
            hidden = model.first(model.embed(torch.tensor([1, 2])))
            activations.append(weakref.ref(hidden))
            hidden.square().sum().backward()
            del hidden
            optimizer.step()
            optimizer.zero_grad()
        assert [reference() for reference in activations] == [None] * 3
        parts = [weakref.ref(optimizer), weakref.ref(optimizer._reducer), weakref.ref(optimizer._storage.flats[0])]
        optimizer.close()
        del optimizer
        assert [reference() for reference in parts] == [None] * 3
    finally:
        gc.enable()


def test_after_a_failure_every_call_names_it_and_close_still_frees_the_model() -> None:
    def program(transport: Transport) -> list[str]:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, process_group=transport, lr=0.1)
        model(1.0).backward()
        messages = []
        for call in (
            optimizer.step if transport.rank else optimizer.check_replicas,
            optimizer.step,
            model(1.0).backward,
        ):
            with pytest.raises(CollectiveError) as caught:
                call()
            messages.append(str(caught.value))
        optimizer.close()
        model.zero_grad()
        model(1.0).backward()
        SGD(model.parameters(), lr=0.1).step()
        return messages

    for first, *later in on_threads(2, program, timeout=5):
        assert "step()" in first
        assert "check_replicas()" in first
        assert all("closed since an earlier failure" in message for message in later)


def test_an_interrupt_inside_a_wait_loses_nothing() -> None:
    armed = [False]

    def interfere(rank: int, event: str, peer: int) -> None:
        if armed[0] and rank == 0 and event == "wait":
            armed[0] = False
            raise KeyboardInterrupt

    def program(transport: Transport) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, process_group=transport, bucket_cap_mb=1e-6, lr=0.1)
        armed[0] = armed[0] or transport.rank == 0
        try:
            model(1.0 + transport.rank).backward()
        except KeyboardInterrupt:
            assert transport.rank == 0
        optimizer.step()
        return model

    plain = Two()
    for rank in range(2):
        plain(1.0 + rank).backward()
    for p in plain.parameters():
        p.grad.div_(2)  # type: ignore[union-attr]
    SGD(plain.parameters(), lr=0.1).step()
    ours = Loopback[nn.Module](2, timeout=5, interfere=interfere).run(program)[1]
    assert_same_bits(ours.b, plain.b)


def test_loading_shares_nothing_with_the_dict_and_saving_nothing_with_the_optimizer() -> None:
    model = Two()
    optimizer = ZeroOptimizer(model, SGD, lr=torch.tensor(0.3), momentum=0.9)
    model(1.0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"].clear()
    assert optimizer.state_dict()["state"]
    plain = SGD(Two().parameters(), lr=torch.tensor(0.25), momentum=0.9)
    theirs = plain.state_dict()
    theirs["state"] = {0: {"momentum_buffer": None}}
    optimizer.load_state_dict(theirs)
    optimizer.param_groups[0]["lr"].fill_(9)
    assert theirs["param_groups"][0]["lr"] == 0.25
    optimizer.zero_grad()
    model(1.0).backward()
    expected = 2 * model.a.detach()  # a first buffer is the gradient itself
    optimizer.step()
    assert_same_bits(optimizer.state_dict()["state"][0]["momentum_buffer"], expected)
    assert bool(expected.any())


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


# -- checkpoints ------------------------------------------------------------------------------------------------------


@settings(max_examples=10 + settings.default.max_examples // 20)  # each trains four times
@given(st.data())
def test_training_on_from_a_saved_dict_is_exact_at_another_stage_and_number_of_ranks(data: st.DataObject) -> None:
    """a + b steps = a steps, save, load elsewhere (or into the class itself, or from it), b steps."""
    from .programs import CLASSES

    name = data.draw(st.sampled_from(sorted(CLASSES)))
    cls, arguments = CLASSES[name]
    first, second = (
        data.draw(st.sampled_from(["plain", *((w, s) for w in (1, 2, 3, 5) for s in (0, 1, 2))])) for _ in "ab"
    )
    caps = [data.draw(st.sampled_from([1e-6, 0.0005, 25.0])) for _ in "ab"]

    def run(where: Any, cap: float, steps: range, weights: Any, states: Any) -> tuple[Any, Any]:
        if where == "plain":
            return plain_run(steps, weights, states)

        def program(transport: Transport) -> tuple[Any, Any]:
            model = locked_build(0)
            if weights is not None:
                model.load_state_dict(weights)
            optimizer = ZeroOptimizer(
                model, cls, stage=where[1], process_group=transport, bucket_cap_mb=cap, divisor=30, **arguments
            )
            if states is not None:
                optimizer.load_state_dict(copy.deepcopy(states))
            for step in steps:
                optimizer.zero_grad()
                for batch in share(odd_batches(30, step), transport.rank, where[0]):
                    odd_loss(model, batch).backward()
                optimizer.step()
            optimizer.consolidate_state_dict(where[0] - 1)
            last = transport.rank == where[0] - 1
            return copy.deepcopy(model.state_dict()), optimizer.state_dict() if last else None

        return on_threads(where[0], program, timeout=10)[-1]

    def plain_run(steps: range, weights: Any, states: Any) -> tuple[Any, Any]:
        model = locked_build(0)
        if weights is not None:
            model.load_state_dict(weights)
        optimizer = cls(model.parameters(), **arguments)
        if states is not None:
            optimizer.load_state_dict(copy.deepcopy(states))
        for step in steps:
            optimizer.zero_grad()
            plain_step(model, optimizer, odd_loss, odd_batches(30, step), 30)
        return model.state_dict(), optimizer.state_dict()

    weights, states = run(first, caps[0], range(2), None, None)
    weights, states = run(second, caps[1], range(2, 3), weights, states)
    plain_weights, plain_states = plain_run(range(3), None, None)
    for key, value in plain_weights.items():
        assert_same_bits(weights[key], value, key)
    assert_same_states(states, plain_states)


def test_a_saved_dict_has_torchs_own_form_and_names() -> None:
    model = locked_build(0)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    odd_loss(model, odd_batches(1)[0]).backward()
    optimizer.step()
    plain = locked_build(0)
    adamw = torch.optim.AdamW(plain.named_parameters(), lr=1e-2)
    odd_loss(plain, odd_batches(1)[0]).backward()
    adamw.step()
    ours, theirs = optimizer.state_dict(), adamw.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert_same_states(ours, theirs)
    for index, state in theirs["state"].items():
        for key, value in state.items():
            assert ours["state"][index][key].stride() == value.stride(), (index, key)


# -- memory and traffic -----------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(67, 67) for _ in range(5)))


@ALL_STAGES
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("cap", [0.01, 0.04, 25.0])
def test_bytes_of_a_rank_are_those_of_the_formulas(stage: int, world_size: int, cap: float) -> None:
    def program(transport: Transport) -> None:
        with torch.random.fork_rng(enabled=False):
            model = locked_wide()
        optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport, bucket_cap_mb=cap)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 67)).square().sum().backward()
            gradients = optimizer.describe().bytes["gradients"]
            optimizer.step()
        description = optimizer.describe()
        psi, parameters, slices = 5 * (67 * 67 + 67), 10, len(description.buckets)
        share_ = 1 if stage == 0 else world_size
        formula = {
            "parameters": 4 * psi,
            "gradients": {0: 4 * psi + 4 * psi // world_size, 1: 4 * psi, 2: 4 * psi // world_size}[stage],
            "optimizer": 8 * psi // share_,
        }
        measured = {**description.bytes, "gradients": gradients}
        for kind, nbytes in formula.items():
            assert description.formula_bytes[kind] == pytest.approx(nbytes, abs=4), kind
            tensors = 3 if kind == "optimizer" else 2 if kind == "gradients" else 1
            slack = tensors * 64 * (parameters + slices)
            assert nbytes - slack <= measured[kind] <= nbytes + slack, (kind, nbytes, measured[kind])
        largest = max(b.parameter_bytes for b in description.buckets)
        assert measured["scratch_peak"] <= 3 * largest

    on_threads(world_size, program)


def locked_wide() -> nn.Module:
    from .programs import _BUILDING

    with _BUILDING:
        return wide()


@ALL_STAGES
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("backwards", "synchronised"), [(1, 1), (3, 3), (3, 1)])
def test_traffic_is_the_closed_form(stage: int, world_size: int, backwards: int, synchronised: int) -> None:
    def program(transport: Transport) -> tuple[int, int, int]:
        model = locked_wide()
        model[2].requires_grad_(False)
        optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport, bucket_cap_mb=0.03)
        for _ in range(2):
            before = optimizer.traffic
            for index in range(backwards):
                loss = model(torch.ones(2, 67)).square().sum()
                if index < backwards - synchronised:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        spent = optimizer.traffic - before
        padded = 4 * sum(b.bounds[-1] for b in optimizer.describe().buckets if b.trainable)
        return spent.payload_sent, optimizer.describe().formula_traffic_bytes(backwards, synchronised), padded

    results = on_threads(world_size, program)
    passes = {0: 2 * synchronised, 1: synchronised + 1, 2: synchronised + 1}[stage]
    assert sum(sent for sent, _, _ in results) == passes * (world_size - 1) * results[0][2]
    assert results[0][1] == passes * (world_size - 1) * results[0][2]


def test_at_stage_2_no_rank_holds_all_reduced_gradients_after_backward() -> None:
    def program(transport: Transport) -> int:
        model = locked_wide()
        optimizer = ZeroOptimizer(model, stage=2, process_group=transport, bucket_cap_mb=0.02)
        model(torch.ones(2, 67)).square().sum().backward()
        model(torch.ones(2, 67)).square().sum().backward()
        return optimizer.describe().bytes["gradients"]

    whole = 4 * 5 * (67 * 67 + 67)
    for held in on_threads(4, program):
        assert held <= whole / 4 + 64 * 15
