"""One thread of a rank at a time is inside a forward or a backward; another is refused, and training goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport
from zero.parameters.unit_manager import UnitManager

from ..support.limits import PATIENT
from ..support.plain import assert_same_model
from ..support.rows import rows
from .stage3 import INPUTS, WORLDS, Run, plain

REFUSAL = "another thread, 'first', is inside a forward"


class Thread(threading.Thread):
    """A thread whose ``future`` has its result, or the error that ended it."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self.future = work, Future[Any]()
        self.start()

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(error)


def in_a_thread(work: Callable[[], Any], name: str = "another") -> Any:
    """Run ``work`` in a thread, and return its result or raise its error."""
    return Thread(work, name).future.result(PATIENT)


class Rank(Run):
    """Training on one rank, and threads that evaluate meanwhile."""

    def enter_a_unit(self) -> Any:
        """Enter the unit in which `inside_a_forward` is."""
        return self.model.block(0)(INPUTS)

    @contextmanager
    def inside_a_forward(self) -> Iterator[Thread]:
        """Run the block while another thread is inside a forward of the first unit."""
        inside, leave = threading.Event(), threading.Event()

        def hook(*_: Any) -> None:
            if threading.current_thread().name == "first":
                inside.set()
                assert leave.wait(PATIENT)

        with self.model.block(0).register_forward_pre_hook(hook):
            thread = Thread(self.evaluate, "first")
            assert inside.wait(PATIENT)
            try:
                yield thread
            finally:
                leave.set()
                thread.join(PATIENT)


def trains(world: str, between: Callable[[Rank], None], step: Callable[[Rank], None] = Rank.step) -> None:
    """Check for the plain loop's bits, whatever is done before the second step."""

    def program(transport: Transport) -> nn.Module:
        run = Rank(transport, stage=3)
        step(run)
        between(run)
        for _ in range(2):
            step(run)
        run.optimizer.close()
        model: nn.Module = run.model
        return model

    ranks, size = WORLDS[world]
    for model in ranks(size, program, timeout=PATIENT):
        assert_same_model(model, plain(3))


@pytest.mark.parametrize("world", rows(["one"], ["travel", "common"]))
def test_whatever_is_begun_beside_a_forward_of_another_thread_is_refused(world: str) -> None:
    def evaluate_at_once(run: Rank) -> None:
        expected = run.evaluate()
        with run.inside_a_forward() as first:
            for work in (run.evaluate, run.enter_a_unit, run.loss):
                with pytest.raises(RuntimeError, match=REFUSAL):
                    work()
                with pytest.raises(RuntimeError, match=REFUSAL):
                    in_a_thread(work)
            for call in (run.optimizer.step, run.optimizer.close):
                with pytest.raises(RuntimeError, match="inside a forward"):
                    call()
        assert torch.equal(first.future.result(0), expected)

    trains(world, evaluate_at_once)


@pytest.mark.parametrize("world", ["travel", "common"])
def test_a_forward_and_a_backward_beside_a_backward_of_another_thread_are_refused(world: str) -> None:
    said = list[str]()

    def step(run: Rank) -> None:
        kept, loss = run.loss(), None

        def beside(_: Tensor) -> None:
            for work in (run.evaluate, kept.backward) if run.rank == 0 else ():
                with pytest.raises(RuntimeError, match=r"another thread, '.*', is inside a backward") as caught:
                    in_a_thread(work)
                said.append(str(caught.value))

        def watch(_: nn.Module, __: Any, output: Tensor) -> None:
            output.register_hook(beside)

        with run.model.block(1).register_forward_hook(watch):
            loss = run.loss()
        loss.backward()
        run.end_step()

    trains(world, lambda run: None, step)
    assert len(said) == 2 * 3


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_later_thread_with_the_number_of_an_interrupted_one_is_not_taken_for_it() -> None:
    """The system gives the number of a thread that has ended to another one, which is inside a forward of its own."""

    def interrupted(run: Rank) -> None:
        expected = run.evaluate()
        with run.model.block(0).register_forward_pre_hook(interrupt):
            first = Thread(run.evaluate, "interrupted")
            assert isinstance(first.future.exception(PATIENT), KeyboardInterrupt)
            first.join(PATIENT)
        inside, leave = threading.Event(), threading.Event()
        module = nn.Linear(2, 2)
        module.register_forward_pre_hook(lambda *_: [None, inside.set(), leave.wait(PATIENT)][0])
        later = Thread(lambda: module(torch.ones(2)), "later")
        assert inside.wait(PATIENT)
        first._ident = later.ident  # type: ignore[attr-defined]  # as if the system had given it again
        try:
            assert torch.equal(run.evaluate(), expected)
        finally:
            leave.set()
            later.join(PATIENT)

    trains("one", interrupted)


def test_a_thread_whose_generators_come_and_go_is_inside_its_forward_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that was read just before its generator yielded has no frame below it."""
    frames = sys._current_frames
    generator = (number for number in range(3))
    next(generator)
    reads = list[int]()

    def between(run: Rank) -> None:
        with run.inside_a_forward() as first:

            def yielded() -> Any:
                reads.append(len(reads))
                return {**frames(), first.ident: generator.gi_frame} if len(reads) % 2 else frames()

            monkeypatch.setattr(sys, "_current_frames", yielded)
            for _ in range(4):
                with pytest.raises(RuntimeError, match=REFUSAL):
                    run.evaluate()
            monkeypatch.setattr(sys, "_current_frames", frames)

    trains("one", between)
    assert len(reads) >= 8


def test_a_forward_begins_when_all_of_another_threads_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    releasing, begun, release = threading.Event(), threading.Event(), UnitManager._uninstall

    def slowly(manager: UnitManager, unit: Any) -> None:
        if threading.current_thread().name == "first" and not releasing.is_set():
            releasing.set()
            begun.wait(0.3)  # another forward begins meanwhile, unless it is blocked
        release(manager, unit)

    def evaluate(run: Rank) -> None:
        expected = run.evaluate()
        monkeypatch.setattr(UnitManager, "_uninstall", slowly)
        thread = Thread(run.enter_a_unit, "first")  # the unit itself is the outermost call
        assert releasing.wait(PATIENT)
        with run.model.block(0).register_forward_hook(lambda *_: begun.set()):
            found = run.evaluate()  # it waits
        thread.future.result(PATIENT)
        assert torch.equal(found, expected)

    trains("one", evaluate)
