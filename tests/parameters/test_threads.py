"""Threads of one rank at stage 3: only one may be inside a forward, and another gets an error in one line.

Training then continues with the plain loop's bits. Forward, backward and step may run in different threads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.parameters.unit_hooks import in_forward
from zero.parameters.unit_manager import UnitManager

from ..support.models import build, odd_batches, odd_loss
from ..support.plain import assert_same_model, plain_step
from ..support.sockets import on_sockets

LIMIT = 60.0  # seconds for which a thread waits for another, which may compile meanwhile
STEPS = 3
REFUSAL = "another thread, 'first', is inside a forward"
_BUILDING = threading.Lock()  # all threads share torch's generator
RANKS = pytest.mark.parametrize(
    ("ranks", "world_size"),
    [(on_threads, 1), (on_threads, 2), (on_sockets, 2)],  # one rank, units that are sent, shared memory
    ids=["one-rank", "travel", "common"],
)


class PlannedError(Exception):
    """Raised to leave a forward."""


class Thread(threading.Thread):
    """A thread that keeps its result, or the error that ended it."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self.found, self.error = work, None, None  # type: Any, Any, BaseException | None

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self.found = self._work()
        except BaseException as error:
            self.error = error


def in_a_thread(work: Callable[[], Any], name: str = "another") -> Any:
    """Run ``work`` in a thread, and return its result or raise its error."""
    thread = Thread(work, name)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()
    if thread.error is not None:
        raise thread.error
    return thread.found


class Rank:
    """Training on one rank, and threads that evaluate meanwhile."""

    def __init__(self, transport: Transport, built: threading.Barrier | None = None) -> None:
        """``built``: a barrier; no thread builds its optimizer, which draws random numbers too, before all have built
        their models."""
        with _BUILDING:
            self.model: Any = build(0)
        if built is not None:
            built.wait(LIMIT)
        self.rank, self.world_size = transport.rank, transport.world_size
        self.optimizer = ZeroOptimizer(
            self.model, torch.optim.AdamW, stage=3, process_group=transport, lr=0.1, bucket_cap_mb=0.0005
        )

    def loss(self, number: int) -> Any:
        return odd_loss(self.model, batches(self.world_size)[number][self.rank])

    def end_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, number: int) -> None:
        self.loss(number).backward()
        self.end_step()

    def evaluate(self) -> Any:
        with torch.no_grad():
            return self.loss(0)

    def enter_a_unit(self) -> Any:
        """Enter the unit in which `inside_a_forward` is."""
        return self.model.layers[0](torch.ones(2, 13))

    @contextmanager
    def inside_a_forward(self, work: Callable[[], Any] | None = None, ends: bool = True) -> Iterator[Thread]:
        """Run the block while another thread is inside a forward of the first unit."""
        inside, leave = threading.Event(), threading.Event()

        def hook(*_: Any) -> None:
            if threading.current_thread().name == "first":
                inside.set()
                assert leave.wait(LIMIT)
                if not ends:
                    raise PlannedError

        with self.model.layers[0].register_forward_pre_hook(hook):
            thread = Thread(work or self.evaluate, "first")
            thread.start()
            assert inside.wait(LIMIT), thread.error
            try:
                yield thread
            finally:
                leave.set()
                thread.join(LIMIT)
            assert not thread.is_alive()


def batches(world_size: int) -> list[list[Any]]:
    return [odd_batches(world_size, seed=step, extra=False) for step in range(STEPS)]


def plain(world_size: int) -> nn.Module:
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in batches(world_size):
        plain_step(model, optimizer, odd_loss, step, world_size)
        optimizer.zero_grad()
    return model


def trains(ranks: Callable[..., list[Any]], world_size: int, between: Callable[[Rank], None]) -> None:
    """Check for the plain loop's bits, whatever is done before the second step."""

    def program(transport: Transport) -> nn.Module:
        run = Rank(transport)
        run.step(0)
        between(run)
        for number in range(1, STEPS):
            run.step(number)
        run.optimizer.close()
        model: nn.Module = run.model
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(world_size))


@RANKS
def test_a_forward_beside_one_of_another_thread_is_refused_and_training_goes_on(ranks: Any, world_size: int) -> None:
    def evaluate_at_once(run: Rank) -> None:
        expected = run.evaluate()
        with run.inside_a_forward() as first:
            for work in (run.evaluate, run.enter_a_unit):
                with pytest.raises(RuntimeError, match=REFUSAL):
                    work()
                with pytest.raises(RuntimeError, match=REFUSAL):
                    in_a_thread(work)
        assert first.error is None
        assert torch.equal(first.found, expected)

    trains(ranks, world_size, evaluate_at_once)


@RANKS
def test_a_forward_of_training_is_refused_like_one_that_evaluates(ranks: Any, world_size: int) -> None:
    def train_beside(run: Rank) -> None:
        with run.inside_a_forward(lambda: run.loss(1)) as first, pytest.raises(RuntimeError, match=REFUSAL):
            run.loss(1)
        del first.found

    trains(ranks, world_size, train_beside)


@RANKS
def test_an_error_in_one_thread_leaves_the_others_as_they_were(ranks: Any, world_size: int) -> None:
    def fail(run: Rank) -> None:
        expected = run.evaluate()
        with run.inside_a_forward(ends=False) as first, pytest.raises(RuntimeError, match=REFUSAL):
            run.evaluate()
        assert isinstance(first.error, PlannedError)
        assert torch.equal(in_a_thread(run.evaluate), expected)

    trains(ranks, world_size, fail)


@RANKS
def test_one_thread_after_the_other_may_run_any_part_of_a_step(ranks: Any, world_size: int) -> None:
    def program(transport: Transport) -> nn.Module:
        run = Rank(transport)
        for number in range(STEPS):
            loss = in_a_thread(lambda: run.loss(number))  # noqa: B023 - it has ended
            in_a_thread(run.evaluate)
            in_a_thread(loss.backward)
            in_a_thread(run.end_step)
        in_a_thread(run.optimizer.close)
        model: nn.Module = run.model
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(world_size))


@RANKS
def test_step_and_close_beside_a_forward_of_another_thread_are_refused(ranks: Any, world_size: int) -> None:
    def step_and_close(run: Rank) -> None:
        with run.inside_a_forward() as first:
            with pytest.raises(RuntimeError, match="inside a forward"):
                run.optimizer.step()
            with pytest.raises(RuntimeError, match="inside a forward"):
                run.optimizer.close()
        assert first.error is None

    trains(ranks, world_size, step_and_close)


@RANKS
@pytest.mark.by_default("one-rank", "travel")
def test_a_forward_that_is_refused_inside_a_backward_releases_nothing(ranks: Any, world_size: int) -> None:
    """On one rank, and on ranks whose backward has gathered units."""

    def program(transport: Transport) -> nn.Module:
        run = Rank(transport)
        refused = []

        def beside(_: Tensor) -> None:
            if transport.rank == 0:
                with pytest.raises(RuntimeError, match=r"another thread, '.*', is inside a backward") as caught:
                    in_a_thread(run.evaluate)
                refused.append(str(caught.value))

        def watch(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(beside)

        for number in range(STEPS):
            with run.model.layers[1].register_forward_hook(watch):
                run.step(number)
        assert len(refused) == (STEPS if transport.rank == 0 else 0)
        run.optimizer.close()
        model: nn.Module = run.model
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(world_size))


@RANKS
def test_a_thread_that_is_refused_leaves_the_compiled_call_of_another_as_it_is(ranks: Any, world_size: int) -> None:
    def program(transport: Transport) -> None:
        run = Rank(transport)
        unit = run.model.layers[0]
        unit.compile(backend="eager")
        run.step(0)
        seen: list[int] = []
        hooks: Any = unit._forward_pre_hooks
        with run.inside_a_forward() as first:
            seen.append(len(hooks))
            with pytest.raises(RuntimeError, match=REFUSAL):
                in_a_thread(run.enter_a_unit)
            seen.append(len(hooks))
        assert first.error is None
        assert seen == [1, 1]  # the hook of the test, inside the compiled call
        run.step(1)
        run.optimizer.close()

    ranks(world_size, program, timeout=60)


@RANKS
def test_a_forward_and_a_backward_beside_a_backward_of_another_thread_are_refused(ranks: Any, world_size: int) -> None:
    def program(transport: Transport) -> nn.Module:
        run = Rank(transport)
        run.step(0)
        kept = run.loss(1)
        said = []

        def beside(_: Tensor) -> None:
            for work in (run.evaluate, kept.backward):
                with pytest.raises(RuntimeError, match=r"another thread, '.*', is inside a backward") as caught:
                    in_a_thread(work)
                said.append(str(caught.value))

        loss = run.loss(1)
        with run.model.first.weight.register_hook(beside):
            loss.backward()
        assert len(said) == 2
        run.end_step()
        run.step(2)
        run.optimizer.close()
        model: nn.Module = run.model
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(world_size))


@RANKS
def test_after_an_interrupt_in_one_thread_another_evaluates_and_trains(ranks: Any, world_size: int) -> None:
    def interrupt(run: Rank) -> None:
        expected = run.evaluate()

        def hook(*_: Any) -> None:
            raise KeyboardInterrupt

        with run.model.layers[0].register_forward_pre_hook(hook), pytest.raises(KeyboardInterrupt):
            in_a_thread(run.evaluate)
        assert torch.equal(run.evaluate(), expected)

    trains(ranks, world_size, interrupt)


def test_a_later_thread_with_the_number_of_an_interrupted_one_is_not_taken_for_it() -> None:
    """The system gives the number of a thread that has ended to another one."""

    def interrupt(run: Rank) -> None:
        expected = run.evaluate()

        def hook(*_: Any) -> None:
            raise KeyboardInterrupt

        interrupted = Thread(run.evaluate, "interrupted")
        with run.model.layers[0].register_forward_pre_hook(hook):
            interrupted.start()
            interrupted.join(LIMIT)
        assert isinstance(interrupted.error, KeyboardInterrupt)
        inside, leave = threading.Event(), threading.Event()

        def elsewhere(*_: Any) -> None:
            inside.set()
            leave.wait(LIMIT)

        module = nn.Linear(2, 2)
        module.register_forward_pre_hook(elsewhere)
        later = Thread(lambda: module(torch.ones(2)), "later")
        later.start()
        assert inside.wait(LIMIT)
        interrupted._ident = later.ident  # type: ignore[attr-defined]  # as if the system had given it again
        try:
            assert in_forward(later)
            assert torch.equal(run.evaluate(), expected)
        finally:
            leave.set()
            later.join(LIMIT)

    trains(on_threads, 1, interrupt)


@RANKS
def test_a_thread_evaluates_inside_the_gathered_block_of_another(ranks: Any, world_size: int) -> None:
    def evaluate(run: Rank) -> None:
        with run.optimizer.gathered():
            expected = run.evaluate()
            assert torch.equal(in_a_thread(run.evaluate), expected)
        assert torch.equal(in_a_thread(run.evaluate), expected)

    trains(ranks, world_size, evaluate)


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Make threads switch after a few lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_a_thread_whose_generators_come_and_go_is_inside_its_forward_still() -> None:
    """After a generator has yielded, its frame has no frame below it."""
    inside, over = threading.Event(), threading.Event()

    def numbers(*_: Any) -> None:
        inside.set()
        while not over.is_set():
            sum(number for number in range(20))

    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(numbers)
    thread = Thread(lambda: module(torch.ones(2)), "first")
    thread.start()
    assert inside.wait(LIMIT)
    end = time.monotonic() + 2
    try:
        while time.monotonic() < end:
            assert in_forward(thread)
    finally:
        over.set()
        thread.join(LIMIT)
    assert not in_forward(thread)
    assert not in_forward(threading.current_thread())


def test_a_forward_begins_when_all_of_another_threads_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    releasing = threading.Event()
    release = UnitManager._uninstall

    def slowly(manager: UnitManager, unit: Any) -> None:
        if threading.current_thread().name == "first" and not releasing.is_set():
            releasing.set()
            threading.Event().wait(0.3)  # long enough for another forward to begin, unless it is blocked
        release(manager, unit)

    def evaluate(run: Rank) -> None:
        expected = run.evaluate()
        monkeypatch.setattr(UnitManager, "_uninstall", slowly)
        thread = Thread(run.enter_a_unit, "first")  # the unit itself is the outermost call
        thread.start()
        assert releasing.wait(LIMIT)
        found = run.evaluate()  # it waits
        thread.join(LIMIT)
        assert thread.error is None
        assert torch.equal(found, expected)
        assert torch.equal(run.evaluate(), expected)

    trains(on_threads, 1, evaluate)


@pytest.mark.usefixtures("many_switches")
def test_threads_that_evaluate_as_they_like_are_right_or_refused() -> None:
    def evaluate_often(run: Rank) -> None:
        expected = run.evaluate()
        right, refusals = list[bool](), list[str]()

        def work() -> None:
            for _ in range(40):
                try:
                    found = run.evaluate()
                except RuntimeError as error:
                    refusals.append(str(error))
                else:
                    right.append(torch.equal(found, expected))

        threads = [Thread(work, f"reader {number}") for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(6 * LIMIT)
            assert thread.error is None
            assert not thread.is_alive()
        assert right
        assert all(right)
        assert all("is inside a forward" in refusal for refusal in refusals)

    trains(on_threads, 1, evaluate_often)


def test_optimizers_of_different_models_train_in_threads_of_their_own() -> None:
    """Each is inside a forward while the other is."""
    inside, built = threading.Barrier(2), threading.Barrier(2)

    def program(transport: Transport) -> nn.Module:
        run = Rank(transport, built)
        with run.model.layers[0].register_forward_pre_hook(lambda *_: [None, inside.wait(LIMIT)][0]):
            for number in range(STEPS):
                run.step(number)
        run.optimizer.close()
        model: nn.Module = run.model
        return model

    threads = [Thread(lambda: on_threads(1, program)[0], f"trainer {number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * LIMIT)
        assert thread.error is None, thread.error
        assert_same_model(thread.found, plain(1))


@RANKS
def test_what_is_computed_again_in_a_backward_may_run_in_another_thread_than_the_forward(
    ranks: Any, world_size: int
) -> None:
    def program(transport: Transport) -> nn.Module:
        run = Rank(transport)
        unit = run.model.layers[1]
        forward = unit.forward
        unit.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)
        for number in range(STEPS):
            loss = run.loss(number)
            in_a_thread(loss.backward)
            run.end_step()
        run.optimizer.close()
        model: nn.Module = run.model
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(world_size))
