"""`p.grad` after a backward is right, or raises."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import CollectiveError, Loopback, Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_
from zero.gradients.placeholder import ShardedGradient
from zero.runtime.accumulator import GradAccumulator

from ..support.models import odd_batches, odd_loss
from ..support.plain import Clear, assert_same_bits, assert_same_model, clear, plain_step
from ..support.programs import locked_build
from ..support.small import TwoVectors, plain_two, with_sgd
from ..support.trainings import ALL_STAGES, SGD, SHARDED, Two, solo_transport, trained
from ..test_errors import chain, linear, on_ranks

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
    "assign data": lambda p: setattr(p.grad, "data", torch.zeros(p.shape)),
    "set_": lambda p: p.grad.set_(torch.zeros(p.shape)),
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
        odd_loss(model, (odd_batches(1)[0][0], transport.rank == 1)).backward()  # only rank 1 uses `sometimes`
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


MEMORY: dict[str, Callable[[Tensor], object]] = {
    "data": lambda mean: setattr(mean, "data", torch.ones(mean.shape)),
    "set_": lambda mean: mean.set_(torch.ones(mean.shape)),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("how", MEMORY)
@pytest.mark.parametrize("then", ["clip", "step", "backward"])
@pytest.mark.parametrize("cleared", ["none", "zero_grad", "assigned"])
@pytest.mark.by_default("none-clip-data", "zero_grad-step-set_", "assigned-step-data", "none-backward-data")
def test_stage_0_refuses_a_mean_with_other_memory_until_it_is_cleared(how: str, then: str, cleared: str) -> None:
    """Every rank learns it. Training goes on as if there had been no gradient, or with the one that is assigned."""

    def run(transport: Transport) -> tuple[nn.Module, str]:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=0)
        model(1.0 + transport.rank).backward()
        if transport.rank == 1 or then == "backward":
            MEMORY[how](model.b.grad)  # type: ignore[arg-type]
        calls = {"clip": lambda: optimizer.clip_grad_norm_(1.0), "step": optimizer.step}
        calls["backward"] = lambda: model(1.0).backward()
        for _ in range(2 if then != "backward" else 1):
            with pytest.raises(RuntimeError) as caught:
                calls[then]()
        if then == "backward":
            return plain_two([], 1, steps=0), str(caught.value)
        if cleared == "assigned":
            model.b.grad = torch.full((40,), 2.0)
        elif cleared == "none":
            model.a.grad = model.b.grad = None
        else:
            optimizer.zero_grad()
        if cleared != "assigned":
            model(3.0 + transport.rank).backward()
        assert_same_bits(model.b.grad, optimizer.full_grad(model.b))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
        model(5.0 + transport.rank).backward()
        optimizer.step()
        return model, str(caught.value)

    plain = plain_two([], 1, steps=0)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for scales in ([1.0, 2.0] if cleared == "assigned" else [3.0, 4.0], [5.0, 6.0]) if then != "backward" else ():
        sgd.zero_grad()
        for scale in scales:
            plain(scale).backward()
        for p in plain.parameters():
            assert p.grad is not None
            p.grad.div_(2)
        if scales == [1.0, 2.0]:
            plain.b.grad = torch.full((40,), 2.0)
        sgd.step()
    for model, error in on_threads(2, run, timeout=10):
        assert "the gradient of 'b' was given other memory (by assigning to .data, or by set_())" in error
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_conversion_of_the_module_that_changes_nothing_changes_no_gradient(stage: int) -> None:
    """It assigns each p.grad.data to itself."""
    model = TwoVectors()
    optimizer = with_sgd(model, solo_transport(), stage=stage)
    model(1.0).backward()
    model.to("cpu").float()
    optimizer.step()
    optimizer.close()
    assert_same_model(model, plain_two([(1.0, True)], 1))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mean_that_is_replaced_between_two_clips_is_clipped_once_more(world_size: int) -> None:
    """At stage 0, where p.grad is the mean."""

    def replaced(model: Any, optimizer: Any, clip: Callable[[float], object]) -> None:
        clip(1e9)
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 2
        clip(0.5)
        optimizer.step()

    def program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, 0, 0)
        replaced(model, optimizer, optimizer.clip_grad_norm_)
        return model

    def plain_program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, 0, 0)
        optimizer.close()  # the means are the user's own, and the model is plain
        again = torch.optim.AdamW(model.parameters(), lr=1e-2)
        replaced(model, again, lambda norm: clip_grad_norm_(model.parameters(), norm))
        return model

    for ours, plain in zip(
        on_threads(world_size, program, timeout=5), on_threads(world_size, plain_program, timeout=5), strict=True
    ):
        assert_same_model(ours, plain)


@ALL_STAGES
@pytest.mark.parametrize("when", ["before the first backward", "between backwards", "after clip"])
def test_a_gradient_of_the_users_is_loud_where_it_cannot_count(stage: int, when: str) -> None:
    if stage == 0 and when != "before the first backward":
        return  # p.grad is the mean, and may be replaced

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
@pytest.mark.parametrize("how", ["zeros", "module zeros", "none", "zero_grad"])
def test_a_gradient_that_one_rank_alone_held_does_not_survive_a_clear(stage: int, how: Clear) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, stage=stage, process_group=transport, bucket_cap_mb=1e-6, lr=0.1)
        with optimizer.no_sync():
            model(1.0, transport.rank == 0).backward()
        optimizer.clip_grad_norm_(float("inf"))
        model.a.requires_grad_(False)
        clear(model, optimizer, how)
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


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_no_sync_left_and_was_cleared_does_not_come_back(stage: int, world_size: int) -> None:
    """All gradients of a bucket are stashed.

    Then one is cleared, and the next backward does not reach its parameter.
    """

    def program(transport: Transport) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, stage=stage, process_group=transport, lr=0.1, divisor=1)
        with optimizer.no_sync():
            model(5.0).backward()
        model.a.grad = None
        model(1.0, False).backward()
        model(2.0).backward()
        optimizer.step()
        return model

    plain, once, twice = Two(), Two(), Two()
    once(5.0).backward()
    once(1.0, False).backward()
    twice(2.0).backward()
    assert once.b.grad is not None
    plain.a.grad, plain.b.grad = torch.full((32,), -0.0), torch.full((40,), -0.0)
    for _ in range(world_size):
        plain.b.grad += once.b.grad
    for _ in range(world_size):
        for parameter, other in zip(plain.parameters(), twice.parameters(), strict=True):
            parameter.grad += other.grad  # type: ignore[operator]
    SGD(plain.parameters(), lr=0.1).step()
    for model in on_threads(world_size, program, timeout=5):
        assert_same_model(model, plain)


def test_means_that_an_interrupt_left_ungathered_are_gathered_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next backward finds the means of the first where its own will be; it must not count them as its own."""
    model, plain = Two(), Two()
    optimizer = ZeroOptimizer(model, SGD, stage=0, lr=0.1, divisor=2)
    gather, interrupted = GradAccumulator.gather_means, list[bool]()

    def interrupt(store: GradAccumulator, *arguments: Any) -> Any:
        if len(interrupted) == 1:
            interrupted.append(True)
            raise KeyboardInterrupt
        interrupted.append(False)
        return gather(store, *arguments)

    monkeypatch.setattr(GradAccumulator, "gather_means", interrupt)
    model(1.0).backward()
    with pytest.raises(KeyboardInterrupt):
        model(3.0).backward()
    optimizer.step()
    assert interrupted == [False, True, False]
    for scale in (1.0, 3.0):
        plain(scale).backward()
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(2)
    SGD(plain.parameters(), lr=0.1).step()
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


def test_a_gradient_that_a_hook_changes_after_it_was_handed_over_is_loud() -> None:
    """torch's documentation forbids this to hooks.

    If autograd gave one tensor to two parameters, the change would show.
    """
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


def test_a_backward_that_a_broken_connection_ended_is_forgotten_without_a_wait() -> None:
    """Gradients can be cleared; calls that need the other ranks name the failure."""
    armed = [False]

    def interfere(rank: int, event: str, peer: int) -> None:
        if armed[0] and rank == 0 and event == "send":
            armed[0] = False
            raise OSError("unplugged")

    def program(transport: Transport) -> None:
        model = chain()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, process_group=transport, lr=0.1, bucket_cap_mb=1e-6)
        loss = model(torch.ones(1, 3)).sum()
        armed[0] = armed[0] or transport.rank == 0
        with pytest.raises((OSError, CollectiveError)):
            loss.backward()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(CollectiveError, match="unplugged"):
            optimizer.step()

    Loopback[None](2, timeout=5, interfere=interfere).run(program)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_of_which_a_part_waits_is_not_shown(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport)
        with optimizer.no_sync():
            model(torch.ones(1, 3)).sum().backward()
        optimizer.full_grad(model.weight)

    for message in on_ranks(2, program):
        assert "full_grad of 'weight': what no_sync(), or the zeros of zero_grad(set_to_none=False), left" in message


def test_another_optimizer_may_set_our_gradients_to_zero() -> None:
    """As `torch.optim` does for all of its parameters at once: the gradients exist, and are zero."""

    def program(transport: Transport) -> nn.Module:
        model = chain()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, process_group=transport, lr=0.1, momentum=0.9)
        other = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            other.zero_grad(set_to_none=False)
        optimizer.step()
        return model

    plain = chain()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        plain_step(plain, sgd, lambda m, x: m(x).sum(), [torch.ones(1, 3)] * 2, 2)
        sgd.zero_grad(set_to_none=False)
    sgd.step()
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("bucket_cap_mb", [1.0, 0.0001])
def test_a_missing_gradient_leaves_a_negative_zero(stage: int, bucket_cap_mb: float) -> None:
    """A rank without a gradient of a parameter adds nothing: not even +0.0, which would turn -0.0 into 0.0.

    This holds if it has other gradients of the bucket, and if it has none.
    """

    def program(transport: Transport) -> Tensor | None:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=stage, bucket_cap_mb=bucket_cap_mb)
        model(-0.0, transport.rank == 1).backward()
        return optimizer.full_grad(model.a)

    for gradient in on_threads(2, program, timeout=5):
        assert gradient is not None
        assert_same_bits(gradient, torch.full((32,), -0.0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_is_unfrozen_later_is_trained_from_then_on(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = TwoVectors()
        model.a.requires_grad_(False)
        optimizer = with_sgd(model, transport, stage=stage, module=model, divisor=4)
        for step in range(2):
            model.a.requires_grad_(step == 1)
            for scale in (1.0, 3.0):
                model(scale + transport.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model

    plain = TwoVectors()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        plain.a.requires_grad_(step == 1)
        plain_step(plain, sgd, lambda m, scale: m(scale), [1.0, 2.0, 3.0, 4.0], 4)
        sgd.zero_grad()
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_interrupt_when_a_reduction_has_come_adds_no_contribution_twice(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, of_thread = GradAccumulator._reduced, threading.local()

    def interrupt(store: GradAccumulator) -> None:
        if getattr(of_thread, "armed", False):
            of_thread.armed = False
            raise KeyboardInterrupt
        note(store)

    def program(transport: Transport, *, armed: bool) -> nn.Module:
        model = Two()
        optimizer = ZeroOptimizer(model, SGD, stage=stage, process_group=transport, lr=0.1)
        of_thread.armed = armed and transport.rank == 0
        with pytest.raises(KeyboardInterrupt) if of_thread.armed else nullcontext():
            model(1.0 + transport.rank).backward()
        optimizer.step()
        return model

    monkeypatch.setattr(GradAccumulator, "_reduced", interrupt)
    expected = on_threads(2, partial(program, armed=False))
    for ours, plain in zip(on_threads(2, partial(program, armed=True)), expected, strict=True):
        assert_same_model(ours, plain)
