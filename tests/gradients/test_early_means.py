"""On accelerators ranks gather means at stage 0 while the backward runs, and all that follows is as if they had not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer
from zero.gradients.grad_publisher import ShardedGradient
from zero.runtime.accumulator import GradAccumulator

from ..support.late import LateBackend, on_late_threads
from ..support.plain import assert_same_bits

pytestmark = [pytest.mark.usefixtures("unseen")]
LAYERS, WIDTH = 6, 4
CAP = 0.00006  # MiB: a bucket for each layer


def layers() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for number, weight in enumerate(model.parameters()):
        weight.data = torch.linspace(-0.7, 0.9, WIDTH * WIDTH).roll(number).view(WIDTH, WIDTH)
    return model


class Run:
    """A training of one rank; ``gradients``: p.grad after each backward and clip, where it is the mean."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.gradients, self.model = transport.rank, list[Tensor](), layers()
        given: dict[str, Any] = {"stage": 0, "bucket_cap_mb": CAP, "collective": "all_to_all", "lr": 0.01}
        self.optimizer = ZeroOptimizer(self.model, torch.optim.AdamW, process_group=transport, **given)
        self.set_divisor = partial(setattr, self.optimizer, "divisor", 3.0)

    def backward(self, layer: int = 0, call: Callable[[], object] = lambda: None) -> None:
        """``call``: is called when the gradient of a layer arrives."""
        with self.model[layer].weight.register_hook(lambda _: [call(), None][1]):  # type: ignore[operator, union-attr]
            self.model(torch.linspace(-1, 1, WIDTH) + self.rank).square().sum().backward()
        self.note()

    def note(self) -> None:
        grads = [each.grad for each in self.model.parameters()]
        self.gradients += [grad.clone() for grad in grads if grad is not None and not isinstance(grad, ShardedGradient)]


def with_another_divisor_inside(run: Run) -> None:
    run.backward(0, run.set_divisor)
    run.backward()


def with_a_gradient_zeroed_inside(run: Run) -> None:
    for layer in (LAYERS - 1, LAYERS - 2):  # its means are there, or are being gathered
        run.backward(0, lambda layer=layer: run.model[layer].weight.grad.zero_())  # type: ignore[misc]


def ended_by_an_error_and_with_another_divisor(run: Run) -> None:
    """The backward of each rank ends at another place."""
    with pytest.raises(ZeroDivisionError):
        run.backward(run.rank, lambda: 1 / 0)
    run.set_divisor()
    run.backward()


def with_a_divisor_that_one_rank_sets_inside(run: Run) -> None:
    if run.rank:
        run.set_divisor()
    run.backward(0, lambda: None if run.rank else run.set_divisor())


def train(program: Callable[[Run], None]) -> list[list[Tensor]]:
    def rank(transport: Transport) -> list[Tensor]:
        run = Run(transport)
        for _ in range(2):
            program(run)
            run.optimizer.clip_grad_norm_(0.1)
            run.note()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.optimizer.divisor = 2.0
        run.optimizer.close()
        return [*run.gradients, *(each.detach() for each in run.model.parameters())]

    return on_late_threads(2, rank)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "program",
    [
        with_another_divisor_inside,
        with_a_gradient_zeroed_inside,
        ended_by_an_error_and_with_another_divisor,
        with_a_divisor_that_one_rank_sets_inside,
    ],
)
def test_a_backward_has_the_bits_of_means_that_are_gathered_at_its_end(
    program: Callable[[Run], None], request: pytest.FixtureRequest
) -> None:
    late = train(program)
    request.getfixturevalue("launched")
    for ours, theirs in zip(train(program), late, strict=True):
        assert len(ours) == len(theirs) >= LAYERS
        for mine, expected in zip(ours, theirs, strict=True):
            assert_same_bits(mine, expected)


@pytest.mark.usefixtures("launched")
def test_means_are_gathered_once_and_those_of_all_buckets_but_the_last_ones_beside_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = list[tuple[str, int]]()
    for name in ("launch", "gather_means"):
        method = getattr(GradAccumulator, name)

        def call(self: Any, *given: Any, name: str = name, method: Any = method) -> Any:
            if not self._shard_group.rank:
                noted.append((name, self.bucket.index))
            return method(self, *given)

        monkeypatch.setattr(GradAccumulator, name, call)

    def rank(transport: Transport) -> int:
        Run(transport).backward()
        assert isinstance(transport.backend, LateBackend)
        return transport.backend.most_launched

    assert on_late_threads(2, rank) == [4, 4], "two reductions and two gathers at a time"
    beside = noted[: noted.index(("launch", LAYERS - 1))]
    assert [bucket for name, bucket in noted if name == "gather_means"] == list(range(LAYERS))
    assert [bucket for name, bucket in beside if name == "gather_means"] == list(range(LAYERS - 2))
