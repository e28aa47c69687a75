"""Where autograd runs hooks in two threads of one backward, as on two devices, the sums are those of one thread.

There is one device here. So the test runs the hooks of a backward itself, in two threads, as autograd would: for each
parameter the hook before the accumulation, the accumulation, and the hook after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from collectives import Loopback, Transport
from zero import ZeroOptimizer, engine
from zero.gradients import hooks
from zero.gradients.grad_publisher import ShardedGradient
from zero.gradients.reducer import FoundInf
from zero.runtime import backward_tracker
from zero.runtime.streams import Streams

from ..support.limits import BOUND
from ..support.parts import parts_of
from ..support.plain import assert_same_bits
from ..support.rows import rows

COUNT, NUMEL, STEPS = 8, 40, 3
_HERE = threading.local()  # the backward of this thread


class Backward:
    """A backward: its number, and what is called when it is over."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.callbacks: list[Callable[[], None]] = []

    def __enter__(self) -> Backward:
        _HERE.backward = self
        return self

    def __exit__(self, *_: object) -> None:
        _HERE.backward = None


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the library take threads inside a `Backward` for autograd's."""

    def current() -> int:
        backward = getattr(_HERE, "backward", None)
        return -1 if backward is None else int(backward.number)

    for module in (hooks, backward_tracker, engine):
        monkeypatch.setattr(module, "current_graph_task_id", current)
    monkeypatch.setattr(backward_tracker, "queue_callback", lambda callback: _HERE.backward.callbacks.append(callback))
    yield
    _HERE.backward = None


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to a parameter's gradient, with its hooks, as autograd does."""
    for hook in list((parameter._backward_hooks or {}).values()):
        hook(gradient)
    before = parameter.grad
    if isinstance(before, ShardedGradient):
        before.capture = gradient.clone()
    else:
        parameter.grad = gradient.clone() if before is None else before.add_(gradient)
    hooks_after: dict[int, Callable[[Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", {})
    for after in list(hooks_after.values()):
        after(parameter)


def gradient_of(rank: int, step: int, index: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + 100 * rank + index))


def run_backward(parameters: Sequence[nn.Parameter], rank: int, step: int, number: int) -> None:
    """Run the hooks of all parameters, of every second one in another thread, from the last to the first."""
    backward, both = Backward(number), threading.Barrier(2, timeout=BOUND)

    def side(first: int) -> None:
        both.wait()
        with backward:
            for index in reversed(range(first, COUNT, 2)):
                accumulate(parameters[index], gradient_of(rank, step, index))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(side, (0, 1)))
    with backward:
        for callback in backward.callbacks:
            callback()


def slow(rank: int, event: str, peer: int) -> None:
    """Let other threads run in the midst of every message."""
    time.sleep(2e-4)


@pytest.mark.usefixtures("backwards")
@pytest.mark.parametrize(
    ("stage", "world_size", "ahead"), rows([(2, 3, True)], [(0, 3, True), (1, 3, False), (2, 1, False)])
)
def test_two_threads_give_the_sums_of_one(stage: int, world_size: int, ahead: bool) -> None:
    def program(transport: Transport) -> list[Tensor]:
        parameters = [nn.Parameter(torch.zeros(NUMEL)) for _ in range(COUNT)]
        optimizer = ZeroOptimizer(
            parameters, torch.optim.SGD, stage=stage, process_group=transport, bucket_cap_mb=0.0004, lr=1.0
        )
        if ahead:
            parts_of(optimizer).reducer.hooks.stay_ahead(parts_of(optimizer).storage.buckets)
        for step in range(STEPS):
            run_backward(parameters, transport.rank, step, COUNT * step + 1)
            optimizer.step()
            optimizer.zero_grad()
        values = [parameter.detach().clone() for parameter in parameters]
        optimizer.close()
        return values

    expected = [torch.zeros(NUMEL) for _ in range(COUNT)]
    for step in range(STEPS):
        for index, value in enumerate(expected):
            total = gradient_of(0, step, index)
            for rank in range(1, world_size):
                total += gradient_of(rank, step, index)
            value.sub_(total.div_(world_size), alpha=1.0)
    for values in Loopback[list[Tensor]](world_size, timeout=BOUND, interfere=slow).run(program):
        for ours, theirs in zip(values, expected, strict=True):
            assert_same_bits(ours, theirs)


def test_a_second_device_of_one_unscale_is_told_the_result_of_the_first() -> None:
    flags = FoundInf()
    second, first = torch.zeros(1), torch.zeros(1, device="meta")
    assert not flags.repeats(first, may_be_new=True)
    flags.note(first, True)
    assert flags.repeats(first, may_be_new=False)
    for _ in range(2):
        assert flags.repeats(second, may_be_new=False)
        assert second.item() == 1
    again, other = torch.zeros(1, device="meta"), torch.zeros(1)
    assert not flags.repeats(again, may_be_new=True), "the next unscale_"
    flags.note(again, False)
    assert flags.repeats(other, may_be_new=False)
    assert other.item() == 0
    third = torch.zeros(1)
    assert not flags.repeats(third, may_be_new=True), "that of another step, with parameters of this device alone"
    flags.note(third, False)
    assert not flags.repeats(torch.zeros(1, device="meta"), may_be_new=True)


@pytest.mark.usefixtures("backwards")
def test_no_two_hooks_of_an_optimizer_run_at_once() -> None:
    inside, most = [0], [0]

    class Listening:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def event(*_: object) -> None:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(5e-3)  # another thread would come in
                inside[0] -= 1

            return event

    listener = Listening()
    watching = hooks.GradientHooks(listener, backward_tracker.BackwardTracker(), Streams())  # type: ignore[arg-type]
    optimizer = ZeroOptimizer([nn.Parameter(torch.zeros(NUMEL)) for _ in range(COUNT)], torch.optim.SGD, lr=1.0)
    buckets = parts_of(optimizer).storage.buckets
    for bucket in buckets:
        for slot in range(len(bucket.parameters)):
            watching.watch(bucket, slot)
    run_backward([parameter for bucket in buckets for parameter in bucket.parameters], 0, 0, 1)
    assert most == [1]
