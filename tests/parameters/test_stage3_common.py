"""Units in memory that the ranks of a host share: neighbours in a page do not disturb each other.

Every promise also holds if ranks share no memory. Small units lie in one page, larger ones share the pages at their
borders.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.parameters.resident_units import SharedBucketMemory
from zero.parameters.unit_manager import UnitManager

from ..support.plain import assert_same_bits, assert_same_model, plain_step
from ..support.sockets import on_sockets
from .test_stage3_errors import error_of

RANKS = pytest.mark.parametrize("ranks", [on_threads, on_sockets])
WIDTHS = pytest.mark.parametrize("width", [4, 40])
LIMIT = 8.0
LR = 1e-3  # small enough that nothing diverges
Ranks = Callable[..., list[Any]]


class PlannedError(Exception):
    """Raised to leave a block."""


class Blocks(nn.Sequential):
    """Three units of one size, the same every time."""

    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(3)))
        for number, parameter in enumerate(self.parameters()):
            values = torch.linspace(-0.5, 0.5 + number, parameter.numel()) / width
            parameter.data = values.view(parameter.shape)

    def weight(self, number: int) -> Tensor:
        weight = self[number].weight
        assert isinstance(weight, Tensor)
        return weight


def zero(params: Any, transport: Transport, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(params, torch.optim.SGD, stage=3, process_group=transport, lr=LR, **arguments)


def loss_of(model: nn.Module, _: Any = None) -> Tensor:
    width = next(model.parameters()).shape[0]
    loss: Tensor = model(torch.ones(2, width)).square().sum()
    return loss


def backward(model: Blocks) -> None:
    torch.autograd.backward(loss_of(model))


def train(model: Blocks, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Run a step. With equal batches, two ranks take the step of one."""
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def plain(width: int, steps: int, *, doubled: int | None = None) -> Blocks:
    model = Blocks(width)
    if doubled is not None:
        model.weight(doubled).data.mul_(2)
    train(model, torch.optim.SGD(model.parameters(), lr=LR), steps)
    return model


def then_trained(width: int, transport: Transport, act: Callable[[Blocks, ZeroOptimizer], Any]) -> tuple[Any, Blocks]:
    """Return the result of an action on a rank, and the model after one further step."""
    model = Blocks(width)
    optimizer = zero(model, transport)
    found = act(model, optimizer)
    optimizer.zero_grad()
    train(model, optimizer)
    optimizer.close()
    return found, model


@contextmanager
def late(owner: Any, name: str, seconds: float) -> Iterator[None]:
    """Delay calls of ``owner.name``."""
    call = getattr(owner, name)

    def waiting(*arguments: Any) -> Any:
        time.sleep(seconds)
        return call(*arguments)

    setattr(owner, name, waiting)
    try:
        yield
    finally:
        setattr(owner, name, call)


# -- edits ------------------------------------------------------------------------------------------------------------


def through_data(weight: Tensor) -> Any:
    weight.data.mul_(2)


def beside_a_view(weight: Tensor) -> Any:
    view = weight.detach()
    weight.data.mul_(2)
    return view


def through_numpy(weight: Tensor) -> Any:
    array = weight.detach().numpy()
    array *= 2
    return array


@WIDTHS
@pytest.mark.parametrize("edit", [through_data, beside_a_view, through_numpy])
@pytest.mark.parametrize(("ranks", "editing"), [(on_threads, (0, 1)), (on_sockets, (0,)), (on_sockets, (1,))])
def test_an_edit_is_told_of_its_own_parameter_and_undone_also_where_somebody_keeps_what_he_wrote(
    ranks: Ranks, width: int, edit: Callable[[Tensor], Any], editing: tuple[int, ...]
) -> None:
    """In shared memory, the rank that made the edit undoes it; otherwise the owner."""

    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[str, str]:
        with optimizer.gathered():
            kept = edit(model.weight(1)) if optimizer.rank in editing else None
        message = error_of(optimizer.step)
        again = error_of(optimizer.step)
        del kept
        return message, again

    for (message, again), model in ranks(2, lambda t: then_trained(width, t, act), timeout=LIMIT):
        assert "'1.weight' was edited while its unit was gathered" in message
        assert editing == (0, 1) or f"rank {editing[0]}: '1.weight'" in message
        assert again == "nothing"
        assert_same_model(model, plain(width, 1))


@RANKS
def test_an_edit_of_what_is_about_to_be_listed_is_told(ranks: Ranks) -> None:
    def program(transport: Transport) -> str:
        model = Blocks(4)
        optimizer = zero(model[0].parameters(), transport, module=model)
        with model[2].register_forward_pre_hook(lambda layer, _: layer.weight.data.mul_(2)):
            model(torch.ones(1, 4))
        optimizer.add_param_group({"params": list(model[1].parameters())})
        return error_of(optimizer.step)

    for message in ranks(2, program, timeout=LIMIT):
        assert "'2.weight' was edited while its unit was gathered" in message


def test_a_forward_waits_for_the_slices_of_every_rank_also_where_parameters_were_laid_out_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 writes its slices late: after rank 0's forward, or after that has surely begun."""
    here, over, own = threading.local(), threading.Event(), SharedBucketMemory.own

    def when_late(self: SharedBucketMemory, begin: int, end: int) -> Tensor:
        if getattr(here, "late", False):
            over.wait(0.5)
        return own(self, begin, end)

    monkeypatch.setattr(SharedBucketMemory, "own", when_late)

    def program(transport: Transport) -> Tensor:
        model = Blocks(40)
        optimizer = zero(model[0].parameters(), transport, module=model)
        model(torch.ones(1, 40))
        here.late = transport.rank == 1
        optimizer.add_param_group({"params": list(model[1].parameters())})
        here.late = False
        found: Tensor = model(torch.ones(1, 40))
        over.set()
        return found.detach()

    for found in on_sockets(2, program, timeout=LIMIT):
        assert_same_bits(found, Blocks(40)(torch.ones(1, 40)))


# -- inside a block that writes ---------------------------------------------------------------------------------------


def a_block_that_reads_another(model: Blocks, optimizer: ZeroOptimizer) -> None:
    with optimizer.gathered(model.weight(2)):
        pass


def a_block_that_reads_the_same(model: Blocks, optimizer: ZeroOptimizer) -> None:
    with optimizer.gathered(model.weight(1)):
        pass


def an_exception_beside(model: Blocks, optimizer: ZeroOptimizer) -> None:
    with suppress(PlannedError), optimizer.gathered(model.weight(2)):
        raise PlannedError


def an_exception_around_the_same(model: Blocks, optimizer: ZeroOptimizer) -> None:
    with suppress(PlannedError), optimizer.gathered(model.weight(1)):
        raise PlannedError


def a_forward(model: Blocks, optimizer: ZeroOptimizer) -> None:
    with torch.no_grad():
        model(torch.ones(1, model.weight(0).shape[1]))


def a_norm(model: Blocks, optimizer: ZeroOptimizer) -> None:
    a_forward(model, optimizer)
    optimizer.clip_grad_norm_(1.0)


@RANKS
@WIDTHS
@pytest.mark.parametrize("held", [False, True], ids=["free", "neighbour held"])
@pytest.mark.parametrize(
    "inside",
    [
        a_block_that_reads_another,
        a_block_that_reads_the_same,
        an_exception_beside,
        an_exception_around_the_same,
        a_forward,
        a_norm,
    ],
)
def test_what_happens_inside_a_block_that_writes_undoes_nothing(
    ranks: Ranks, width: int, inside: Callable[[Blocks, ZeroOptimizer], None], held: bool
) -> None:
    def act(model: Blocks, optimizer: ZeroOptimizer) -> None:
        with optimizer.gathered(model.weight(2)):
            kept = model.weight(2).detach() if held else None
        with optimizer.gathered(model.weight(1), write=True):
            model.weight(1).data.mul_(2 + 5 * optimizer.rank)
            inside(model, optimizer)
        del kept

    for _, model in ranks(2, lambda t: then_trained(width, t, act), timeout=LIMIT):
        assert_same_model(model, plain(width, 1, doubled=1))


@WIDTHS
def test_a_block_that_writes_ends_on_a_rank_when_every_rank_has_written(width: int) -> None:
    """Also if the block raises, inside another one. A view of before shows the new values then."""
    ended = threading.Event()

    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[bool, Tensor, Tensor]:
        manager: Any = optimizer._storage.manager
        with optimizer.gathered():
            view = model.weight(1).detach()
        with optimizer.gathered(model.weight(1)):
            with late(manager, "commit", 0.3 if optimizer.rank else 0.0), suppress(PlannedError):  # noqa: SIM117
                with optimizer.gathered(model.weight(1), write=True):
                    model.weight(1).data.mul_(2)
                    raise PlannedError
            waited = ended.is_set() or optimizer.rank == 1
            with optimizer.gathered(model.weight(1)):
                seen = model.weight(1).detach().clone()
        return waited, seen, view.clone()

    commit = UnitManager.commit

    def noted(manager: UnitManager, buffer: Any, slots: Any) -> None:
        commit(manager, buffer, slots)
        if manager.shard_group.rank:
            ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitManager, "commit", noted)
        results = on_sockets(2, lambda t: then_trained(width, t, act), timeout=LIMIT)
    for (waited, seen, view), model in results:
        assert waited
        assert_same_bits(seen, plain(width, 0, doubled=1).weight(1))
        assert_same_bits(view, seen)
        assert_same_model(model, plain(width, 1, doubled=1))


@RANKS
def test_what_a_forward_wrote_is_not_kept_over_a_step(ranks: Ranks) -> None:
    """Even if the ranks check for edits while its unit is still gathered."""

    def act(model: Blocks, optimizer: ZeroOptimizer) -> None:
        def write(layer: nn.Module, _: Any) -> None:
            with optimizer.gathered(model.weight(2), write=True):
                model.weight(2).data.mul_(2)

        backward(model)
        with model[2].register_forward_pre_hook(write):
            model(torch.ones(1, 4))
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()

    expected = Blocks(4)
    optimizer = torch.optim.SGD(expected.parameters(), lr=LR)
    backward(expected)
    expected.weight(2).data.mul_(2)
    optimizer.step()
    optimizer.zero_grad()
    train(expected, optimizer)
    for _, model in ranks(2, lambda t: then_trained(4, t, act), timeout=LIMIT):
        assert_same_model(model, expected)


# -- external references ----------------------------------------------------------------------------------------------


@WIDTHS
@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_step_ends_on_a_rank_when_every_rank_has_written(width: int, held: int) -> None:
    """Rank 1 writes late. A view that rank 0 has of any unit shows only new values as soon as its step ends."""

    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[Tensor, list[Tensor], str]:
        with optimizer.gathered():
            view = model.weight(held).detach()
        backward(model)
        with late(optimizer._user_optimizers, "step", 0.3 if optimizer.rank else 0.0):
            optimizer.step()
        shown = view.clone()
        with optimizer.gathered():
            seen = [parameter.detach().clone() for parameter in model.parameters()]
        return shown, seen, error_of(optimizer.check_replicas)

    for (shown, seen, message), model in on_sockets(2, lambda t: then_trained(width, t, act), timeout=LIMIT):
        assert_same_bits(shown, plain(width, 1).weight(held))
        for value, expected in zip(seen, plain(width, 1).parameters(), strict=True):
            assert_same_bits(value, expected)
        assert message == "nothing"
        assert_same_model(model, plain(width, 2))


@WIDTHS
@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_view_of_one_unit_that_travels_makes_no_other_out_of_date(width: int, held: int) -> None:
    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[Tensor, list[Tensor], str]:
        with optimizer.gathered():
            view = model.weight(held).detach()
        train(model, optimizer)
        shown = view.clone()
        with optimizer.gathered():
            seen = [parameter.detach().clone() for parameter in model.parameters()]
        return shown, seen, error_of(optimizer.check_replicas)

    for (shown, seen, message), model in on_threads(2, lambda t: then_trained(width, t, act), timeout=LIMIT):
        assert bool(shown.isnan().all())
        for value, expected in zip(seen, plain(width, 1).parameters(), strict=True):
            assert_same_bits(value, expected)
        assert message == "nothing"
        assert_same_model(model, plain(width, 2))


@WIDTHS
def test_what_is_written_into_an_array_of_a_unit_that_travels_is_lost(width: int) -> None:
    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[str, list[Tensor]]:
        with optimizer.gathered():
            array = model.weight(1).detach().numpy()
        for _ in range(2):
            array.fill(77)
            train(model, optimizer)
        array.fill(77)
        del array
        with optimizer.gathered():
            seen = [parameter.detach().clone() for parameter in model.parameters()]
        return error_of(optimizer.check_replicas), seen

    for (message, seen), model in on_threads(2, lambda t: then_trained(width, t, act), timeout=LIMIT):
        assert message == "nothing"
        for value, expected in zip(seen, plain(width, 2).parameters(), strict=True):
            assert_same_bits(value, expected)
        assert_same_model(model, plain(width, 3))


@WIDTHS
@pytest.mark.parametrize("runs", [False, True], ids=["no forward", "a forward"])
def test_what_is_written_into_an_array_after_its_block_is_told_and_undone(width: int, runs: bool) -> None:
    """Also on a rank that ran no forward since; and nothing stays of it when the other ranks have written there."""

    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[str, str, list[Tensor], Tensor]:
        with optimizer.gathered():
            array = model.weight(1).detach().numpy()
        optimizer.step()  # without gradients; edits of before are looked for
        if optimizer.rank == 0:
            array.fill(77)
        if optimizer.rank == 1 or runs:
            backward(model)
        message = error_of(optimizer.step)
        optimizer.zero_grad()
        backward(model)
        again = error_of(optimizer.step)
        with optimizer.gathered():
            seen = [parameter.detach().clone() for parameter in model.parameters()]
        return message, again, seen, torch.from_numpy(array).clone()

    for (message, again, seen, array), model in on_sockets(2, lambda t: then_trained(width, t, act), timeout=LIMIT):
        assert "rank 0: '1.weight' was edited while its unit was gathered" in message
        assert again == "nothing"
        for value, expected in zip(seen, plain(width, 1).parameters(), strict=True):
            assert_same_bits(value, expected)
        assert_same_bits(array, plain(width, 1).weight(1))
        assert_same_model(model, plain(width, 2))


class Windows(torch.autograd.Function):
    """A function that saves many views of a weight, and returns them in the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*(weight.view(-1)[place : place + 2] for place in range(weight.numel() - 1)))
        return inputs * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.seen += ctx.saved_tensors
        return gradients[0], None, None


@RANKS
def test_views_that_a_backward_needs_are_right_and_one_that_is_kept_over_a_step_shows_no_old_value(
    ranks: Ranks,
) -> None:
    def program(transport: Transport) -> tuple[list[Tensor], Tensor]:
        model = Blocks(4)
        optimizer = zero(model, transport)
        seen: list[Tensor] = []

        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            return Windows.apply(inputs[0].clone().requires_grad_(), model.weight(1), seen)  # type: ignore[no-any-return, no-untyped-call]

        with model[1].register_forward_pre_hook(before):
            backward(model)
            values, kept = [view.detach().clone() for view in seen], seen[3]
            optimizer.zero_grad()
            backward(model)
        optimizer.step()
        return values, kept.detach().clone()

    old = Blocks(4).weight(1).detach().reshape(-1)
    new = plain(4, 1).weight(1).detach().reshape(-1)
    for values, kept in ranks(2, program, timeout=LIMIT):
        for place, value in enumerate(values):
            assert_same_bits(value, old[place : place + 2])
        if ranks is on_sockets:
            assert_same_bits(kept, new[3:5])
        else:
            assert bool(kept.isnan().all())


# -- all of it at once ------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 2)
INSIDE = st.tuples(st.sampled_from(["write", "read", "leave", "forward"]), NUMBERS)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["hold", "free", "scribble", "edit"]), NUMBERS),
    st.tuples(st.just("write"), NUMBERS, st.lists(INSIDE, max_size=3)),
    st.tuples(st.just("train")),
)


class Plain:
    """The actions on a model that always has its parameters."""

    def __init__(self, world_size: int, width: int) -> None:
        self._world_size = world_size
        self.model = Blocks(width)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def act(self, name: str, number: int = 0, inside: Any = ()) -> None:
        if name == "train":
            plain_step(self.model, self._optimizer, loss_of, range(self._world_size), self._world_size)
            self._optimizer.zero_grad()
        elif name == "write":
            self.model.weight(number).data.mul_(0.5)
            for action in inside:
                self.act(*action)


class Sharded:
    """The same actions on one rank at stage 3."""

    def __init__(self, transport: Transport, width: int, cap: float) -> None:
        self.model = Blocks(width)
        self._optimizer = zero(self.model, transport, bucket_cap_mb=cap)
        self._held: dict[int, Any] = {}

    def act(self, name: str, number: int = 0, inside: Any = ()) -> None:
        weight = self.model.weight(number)
        if name == "train":
            train(self.model, self._optimizer)
        elif name == "hold":
            with self._optimizer.gathered(weight):
                self._held[number] = weight.detach().numpy()
        elif name == "free":
            self._held.pop(number, None)
        elif name == "scribble" and number in self._held:
            self._scribble(number)
        elif name == "edit":
            self._edit(weight, number)
        elif name == "write":
            with self._optimizer.gathered(weight, write=True):
                weight.data.mul_(0.5 + 3 * self._optimizer.rank)
                for action in inside:
                    self._act_inside(*action)

    def _scribble(self, number: int) -> None:
        """Write into memory that somebody holds: in common memory an edit of the parameter, elsewhere nothing."""
        self._held[number].fill(77)
        if not self._optimizer._storage.unit_hooks.needs_gather:
            message = error_of(self._optimizer.check_replicas)
            assert f"'{number}.weight' was edited while its unit was gathered" in message

    def _edit(self, weight: Tensor, number: int) -> None:
        with self._optimizer.gathered(weight):
            weight.data.mul_(2)
        message = error_of(self._optimizer.check_replicas)
        assert f"'{number}.weight' was edited while its unit was gathered" in message

    def _act_inside(self, name: str, number: int) -> None:
        if name == "write":
            self.act(name, number)
        elif name == "forward":
            a_forward(self.model, self._optimizer)
        else:
            with suppress(PlannedError), self._optimizer.gathered(self.model.weight(number)):
                if name == "leave":
                    raise PlannedError

    def values(self) -> list[Tensor]:
        self._optimizer.check_replicas()
        with self._optimizer.gathered():
            return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.hypothesis
@RANKS
@given(
    world_size=st.integers(2, 3),
    width=st.sampled_from([4, 17, 40]),
    cap=st.sampled_from([1e-6, 0.005, 25.0]),
    actions=st.lists(ACTIONS, min_size=3, max_size=10),
)
@settings(max_examples=settings().max_examples // 2)
def test_after_whatever_is_held_written_and_left_every_rank_sees_what_the_plain_loop_sees(
    ranks: Ranks, world_size: int, width: int, cap: float, actions: list[Any]
) -> None:
    def program(transport: Transport) -> list[list[Tensor]]:
        sharded, seen = Sharded(transport, width, cap), []
        for number, action in enumerate(actions):
            sharded.act(*action)
            if number % 2:
                seen.append(sharded.values())
        return seen

    plain_, expected = Plain(world_size, width), []
    for number, action in enumerate(actions):
        plain_.act(*action)
        if number % 2:
            expected.append([parameter.detach().clone() for parameter in plain_.model.parameters()])
    for seen in ranks(world_size, program, timeout=LIMIT):
        for ours, theirs in zip(seen, expected, strict=True):
            for value, other in zip(ours, theirs, strict=True):
                assert_same_bits(value, other)


def test_what_lies_where_a_buffer_was_before_it_was_moved_is_not_taken_for_it() -> None:
    def program(transport: Transport) -> list[bool]:
        model = Blocks(4)
        optimizer = zero(model, transport)
        manager: Any = optimizer._storage.manager
        found = []
        with optimizer.gathered():
            (buffer,) = manager.units[2].gathered.buffers
            address, size = buffer.unsharded.data_ptr(), buffer.unsharded.numel()
            there = torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)
            found.append(manager.gathered.saved_tensors.find(there) is not None)
            model.weight(1).detach().share_memory_()  # type: ignore[no-untyped-call]
            found.append(manager.gathered.saved_tensors.find(there) is not None)
        return found

    assert on_threads(2, program, timeout=LIMIT) == [[True, False]] * 2


@RANKS
def test_one_rank_alone_trains_in_its_own_memory(ranks: Ranks) -> None:
    for _, model in ranks(1, lambda t: then_trained(4, t, lambda *_: None), timeout=LIMIT):
        assert_same_model(model, plain(4, 1))
