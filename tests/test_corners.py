"""Turns that people take seldom: what no other file asks for, each with what must come of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import CollectiveError, Kind, Loopback, Pairwise, PeerError, Tag, Transport, on_threads
from collectives.algorithms.process_group import Native
from collectives.backends.gloo import DEFAULT_TIMEOUT, _timeout, connect
from zero import ZeroOptimizer
from zero.parameters.released import as_plain

from .cases import Block, Case, Net, assert_plain, batches_of, check, net_of, one_backward, residency_of, sharded
from .plain import assert_same_model, assert_same_states, plain_step
from .pool import GlooPool
from .sockets import on_sockets, on_wires
from .test_errors import chain, linear, linear_locked, on_ranks

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SGD = torch.optim.SGD

# -- what is carried --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_half_a_sum_is_no_sum_on_any_rank(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parts: Any, out: Any) -> None:
        raise error("in the middle")

    def program(transport: Transport) -> str:
        work = Pairwise(transport).reduce_scatter(
            torch.ones(4), [0, 2, 4], torch.empty(2), start=None, tag=Tag(Kind.REDUCE_SCATTER, "bucket 0")
        )
        with pytest.raises(error):
            work.wait()
        with pytest.raises(CollectiveError) as caught:
            transport.exchange(b"", Tag(Kind.EXCHANGE, "later"))
        transport.abort("another reason")
        with pytest.raises(CollectiveError, match="while adding up"):
            transport.check()
        return str(caught.value)

    monkeypatch.setattr("collectives.algorithms.pairwise.ordered_sum", fail)
    for rank, message in enumerate(on_threads(2, program, timeout=5)):
        assert f"rank {rank}, while adding up: {error.__name__}: in the middle" in message


def test_a_backend_never_cuts_a_message_to_fit() -> None:
    def program(transport: Transport) -> None:
        tensor = torch.zeros(3 + transport.rank, dtype=torch.uint8)
        backend = transport.backend
        side = backend.recv(tensor, 0, 0) if transport.rank else backend.send(tensor, 1, 0)
        with pytest.raises(PeerError, match="3 bytes came where 4 fit"):
            side.wait(5)

    on_threads(2, program, timeout=5)


def strange_groups(group: dist.ProcessGroup, rank: int) -> list[str]:
    with pytest.raises(ValueError, match="not a rank of the process group") as stranger:
        connect(dist.GroupMember.NON_GROUP_MEMBER)
    other = pytest.raises(NotImplementedError, match="'cpu:gloo,cuda:nccl'")
    with mock.patch("torch.distributed.get_backend_config", return_value="cuda:nccl"), other:
        connect(group)
    with pytest.raises(CollectiveError, match="exactly these ranks") as part:
        Native(connect(group).split([0, 1] if rank < 2 else [2, 1]))
    work = Native(connect(group)).all_gather(torch.zeros(3), [0, 1, 2, 3], tag=Tag(Kind.ALL_GATHER, "twice"))
    work.wait()
    work.wait()
    return [str(each.value) for each in (stranger, part)]


def test_groups_that_cannot_be_used_say_why(gloo: GlooPool) -> None:
    assert all(len(found) == 2 for found in gloo.run(strange_groups, ranks=range(3)))


def test_where_torch_does_not_tell_a_time_limit_it_is_torchs_default() -> None:
    assert _timeout(SimpleNamespace()) == DEFAULT_TIMEOUT  # type: ignore[arg-type]


def test_a_backward_that_a_broken_connection_ended_is_forgotten_without_a_wait() -> None:
    """Gradients can be cleared; what needs the other ranks names the failure."""
    armed = [False]

    def interfere(rank: int, event: str, peer: int) -> None:
        if armed[0] and rank == 0 and event == "send":
            armed[0] = False
            raise OSError("unplugged")

    def program(transport: Transport) -> None:
        model = chain()
        optimizer = ZeroOptimizer(model, SGD, process_group=transport, lr=0.1, bucket_cap_mb=1e-6)
        loss = model(torch.ones(1, 3)).sum()
        armed[0] = armed[0] or transport.rank == 0
        with pytest.raises((OSError, CollectiveError)):
            loss.backward()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(CollectiveError, match="unplugged"):
            optimizer.step()

    Loopback[None](2, timeout=5, interfere=interfere).run(program)


# -- calls at strange moments -----------------------------------------------------------------------------------------


@ALL_STAGES
def test_calls_inside_a_backward_are_refused_and_the_step_is_right(stage: int) -> None:
    def program(transport: Transport) -> tuple[list[str], nn.Module]:
        model, found = chain(), list[str]()
        optimizer = ZeroOptimizer(model, SGD, stage=stage, process_group=transport, lr=0.1)
        more = {"params": [nn.Parameter(torch.zeros(3))]}

        def act(_: Tensor) -> None:
            for call in (optimizer.zero_grad, optimizer.step, lambda: optimizer.add_param_group(more)):
                with pytest.raises(RuntimeError) as caught:
                    call()
                found.append(str(caught.value))

        hidden = model(torch.ones(1, 3))
        last = next(iter(model[0].parameters()))  # by then the backward has reached parameters
        with last.register_post_accumulate_grad_hook(act):
            hidden.sum().backward()
        optimizer.step()
        optimizer.close()
        return found, model

    plain = chain()
    plain_step(plain, SGD(plain.parameters(), lr=0.1), lambda m, x: m(x).sum(), [torch.ones(1, 3)] * 2, 2)
    for found, model in on_threads(2, program, timeout=5):
        assert [message.split(" inside")[0] for message in found] == ["zero_grad()", "step()", "add_param_group()"]
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_of_which_a_part_waits_is_not_shown(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = linear()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport)
        with optimizer.no_sync():
            model(torch.ones(1, 3)).sum().backward()
        optimizer.full_grad(model.weight)

    for message in on_ranks(2, program):
        assert "full_grad of 'weight': what no_sync() left is not reduced yet" in message


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
        assert "step(): the gradients of rank 0 are settled, those of rank 1 open: clip, step and clear" in message
    for message in on_ranks(2, freezes):
        assert "step(): 'bias' is trainable on rank 0, but frozen on rank 1: freeze and unfreeze on every" in message


def test_another_optimizer_may_set_our_gradients_to_zero() -> None:
    """As `torch.optim` does for all of its parameters at once: they exist, and are zero."""

    def program(transport: Transport) -> nn.Module:
        model = chain()
        optimizer = ZeroOptimizer(model, SGD, process_group=transport, lr=0.1, momentum=0.9)
        other = SGD(model.parameters(), lr=1.0, foreach=True)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            other.zero_grad(set_to_none=False)
        optimizer.step()
        return model

    plain = chain()
    sgd = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        plain_step(plain, sgd, lambda m, x: m(x).sum(), [torch.ones(1, 3)] * 2, 2)
        sgd.zero_grad(set_to_none=False)
    sgd.step()
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_parameters_and_arguments_that_cannot_be() -> None:
    result = nn.Parameter(torch.ones(3)) * 2
    result.retain_grad()  # then torch itself would take it
    with pytest.raises(ValueError, match="'p' is the result of a computation"):
        ZeroOptimizer([("p", result)])
    scripted: Any = torch.jit.script(linear())
    with pytest.raises(ValueError, match="'the module' is a ScriptModule"):
        ZeroOptimizer(scripted)
    with pytest.raises(TypeError, match="units must be a function of a module that returns a bool, not 'blocks'"):
        ZeroOptimizer(chain(), stage=3, units="blocks")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="consolidate_state_dict: rank 9 is not one of the 1 ranks"):
        ZeroOptimizer(linear()).consolidate_state_dict(9)


class OddState(SGD):
    """Keeps a state of another shape than the parameter's."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(2, 2)


def test_a_state_of_another_shape_makes_a_class_not_element_wise() -> None:
    with pytest.raises(ValueError, match=r"OddState is not element-wise: .*its state 'history' has shape \(2, 2\)"):
        ZeroOptimizer(linear(), OddState, lr=0.1)


def test_a_state_dict_of_another_class_with_equal_options_changes_nothing() -> None:
    model = linear()
    optimizer = ZeroOptimizer(model, SGD, lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    foreign = copy.deepcopy(before)
    foreign["state"][0]["square_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="state 'square_avg' of 'weight' belongs to another optimizer class"):
        optimizer.load_state_dict(foreign)
    assert_same_states(optimizer.state_dict(), before)


def test_hooks_on_saving_and_loading_are_called_as_torch_calls_them() -> None:
    def with_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
        calls: list[Any] = []
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "mine": 1})
        optimizer.register_state_dict_post_hook(lambda _, found: calls.append(("saved", sorted(found))))
        optimizer.register_load_state_dict_pre_hook(lambda _, given: {k: v for k, v in given.items() if k != "mine"})
        optimizer.register_load_state_dict_pre_hook(lambda _, given: calls.append(("loading", sorted(given))))
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
        saved = optimizer.state_dict()
        assert saved["mine"] == 1
        optimizer.load_state_dict(saved)
        return calls

    model, plain = linear(), linear()
    found = with_hooks(ZeroOptimizer(model, SGD, lr=0.1))
    assert found == with_hooks(SGD(plain.parameters(), lr=0.1))
    assert len(found) == 4


@pytest.mark.parametrize("bad", [False, True])
def test_a_norm_is_asked_to_be_finite_and_clips_where_it_is(bad: bool) -> None:
    model = linear()
    optimizer = ZeroOptimizer(model, SGD, lr=0.1)
    (model(torch.ones(1, 3)).sum() * (float("inf") if bad else 1)).backward()
    if bad:
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
    else:
        optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
        found = [optimizer.full_grad(p) for p in model.parameters()]
        assert abs(torch.cat([g.view(-1) for g in found if g is not None]).norm().item() - 0.5) < 1e-5  # of rounding


# -- stage 3 ----------------------------------------------------------------------------------------------------------


class Complex(Block):
    """Uses its weight as complex numbers, which are another dtype on the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.inner.weight.view(8, 3, 2)) * torch.complex(x[0, :3], x[1, :3])
        found: Tensor = super().forward(x) + turned.abs().sum()
        return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_that_is_seen_as_another_dtype_is_restored_as_that(world_size: int) -> None:
    check(Case(net_of(Complex)), world_size)


def test_a_users_backward_hook_comes_and_goes_and_leaves_nothing() -> None:
    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(Net), transport)
        seen: list[bool] = []
        handle = model.blocks[1].register_full_backward_pre_hook(
            lambda part, _: seen.append(bool(part.inner.weight.isfinite().all()))
        )
        one_backward(model, batches_of(0, 1)[0])
        assert seen == [True]
        assert len(model.blocks[1]._backward_pre_hooks) == 2
        handle.remove()
        one_backward(model, batches_of(0, 1)[0])
        assert seen == [True]
        assert len(model.blocks[1]._backward_pre_hooks) == 0
        optimizer.step()
        optimizer.close()
        assert_plain(model)

    on_threads(2, program, timeout=5)


def test_memory_that_was_put_into_a_released_parameter_is_told_on_every_rank() -> None:
    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(Net), transport)
        one_backward(model, batches_of(0, 1)[0])
        if transport.rank == 1:
            with as_plain():
                model.head.weight.data = torch.zeros_like(model.head.weight)
        optimizer.step()

    for message in on_ranks(2, program):
        assert "rank 1: the memory of 'head.weight' was replaced" in message


def test_a_stranger_has_no_name_among_units() -> None:
    _, optimizer = sharded(Case(Net), Loopback[None](1).transports[0])
    assert residency_of(optimizer).spec_of(torch.zeros(3)) is None


@pytest.mark.parametrize("ranks", [on_threads, on_wires, on_sockets])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_default_device_is_for_the_users_tensors_alone(ranks: Callable[..., list[nn.Module]], stage: int) -> None:
    """As `torch.set_default_device("cuda")`; of "meta" there are no values at all."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        torch.autograd.backward(model(torch.ones(2, 3, device="cpu")).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        return model

    def program(transport: Transport) -> nn.Module:
        model = linear_locked()
        with torch.device("meta"):
            optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport)
            step(model, optimizer)
            optimizer.consolidate_state_dict(1)
            optimizer.close()
        return model

    expected = linear_locked()
    step(expected, torch.optim.Adam(expected.parameters()))
    for model in ranks(2, program, timeout=10):
        assert_same_model(model, expected)
