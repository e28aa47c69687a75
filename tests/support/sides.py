"""A training loop that a test writes once: it runs on every rank, and as the plain loop, which plays all ranks.

Knows: the calls that most loops make. Does not know: models or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from .plain import Clear, PlainRanks, assert_same_model, assert_same_value, clear

LossOf = Callable[[Any, int], Tensor]  # of a model and a rank


class Side(Protocol):
    """What a loop sees of a rank, or of the plain loop."""

    model: Any
    optimizer: Any
    divisor: float

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that this side plays."""

    def train(self, loss_of: LossOf, *, sync: bool = True, ranks: Iterable[int] | None = None) -> None:
        """Run the backward of a micro-batch on each of ``ranks`` (all by default), outside `no_sync` if ``sync``."""

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor: ...

    def step(self) -> None: ...

    def clear(self, how: Clear = "zero_grad") -> None: ...

    def set_mode(self, mode: str) -> None:
        """Call ``train()`` or ``eval()``, by name, of the model and of the optimizer."""

    def gathered(self, parameters: Any = None, *, write: bool = False) -> AbstractContextManager[None]: ...

    def join(self) -> AbstractContextManager[None]: ...


Loop = Callable[[Side], Any]


class OnRank:
    """A rank."""

    def __init__(self, model: Any, optimizer: ZeroOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step, self.clip = optimizer.step, optimizer.clip_grad_norm_
        self.gathered, self.join = optimizer.gathered, optimizer.join

    @property
    def ranks(self) -> Sequence[int]:
        return (self.optimizer.rank,)

    @property
    def divisor(self) -> float:
        return self.optimizer.divisor

    @divisor.setter
    def divisor(self, divisor: float) -> None:
        self.optimizer.divisor = divisor

    def train(self, loss_of: LossOf, *, sync: bool = True, ranks: Iterable[int] | None = None) -> None:
        if ranks is None or self.optimizer.rank in ranks:
            with nullcontext() if sync else self.optimizer.no_sync():
                loss_of(self.model, self.optimizer.rank).backward()  # type: ignore[no-untyped-call]

    def clear(self, how: Clear = "zero_grad") -> None:
        clear(self.model, self.optimizer, how)

    def set_mode(self, mode: str) -> None:
        getattr(self.model, mode)()
        getattr(self.optimizer, mode)()


class AsPlain(PlainRanks):
    """The plain loop."""

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.world_size)

    def train(self, loss_of: LossOf, *, sync: bool = True, ranks: Iterable[int] | None = None) -> None:
        for rank in range(self.world_size) if ranks is None else ranks:
            self.backward(rank, lambda rank=rank: loss_of(self.model, rank).backward(), sync)  # type: ignore[misc]

    def set_mode(self, mode: str) -> None:
        self.meet()
        getattr(self.model, mode)()
        self.numbers.exchange(self.optimizer, mode)

    def gathered(self, parameters: Any = None, *, write: bool = False) -> AbstractContextManager[None]:
        self.meet()
        return nullcontext()

    def join(self) -> AbstractContextManager[None]:
        return nullcontext()


def same_as_plain(
    loop: Loop,
    build: Callable[[], nn.Module],
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
    world_size: int = 2,
    *,
    run: Callable[..., list[Any]] = on_threads,
    groups: Callable[[Any], Any] | None = None,
    settings: dict[str, Any] | None = None,
    precision: Any = None,
    divisor: float | None = None,
    **arguments: Any,
) -> None:
    """Assert that a loop ends with the same bits on all ranks as in the plain loop, and returns the same.

    ``groups``: what is optimized of a model. ``settings``: arguments for the library alone; ``arguments``: those of the
    class.
    """
    model = build()

    def optimizer_of(updated: Sequence[Tensor]) -> torch.optim.Optimizer:
        return optimizer_class(updated if groups is None else groups(model), **arguments)

    plain = AsPlain(model, optimizer_of, world_size, precision, divisor)
    expected = loop(plain)
    models = [build() for _ in range(world_size)]
    own = {"mixed_precision": precision, "divisor": divisor, **(settings or {}), **arguments}

    def program(transport: Transport) -> tuple[nn.Module, Any]:
        ours = models[transport.rank]
        given = ours if groups is None else groups(ours)
        optimizer = ZeroOptimizer(given, optimizer_class, module=ours, process_group=transport, **own)
        found = loop(OnRank(ours, optimizer))
        optimizer.check_replicas()
        optimizer.close()
        return ours, found

    for ours, found in run(world_size, program, timeout=20):
        assert_same_model(ours, model)
        assert_same_value(found, expected, "what the loop returns")


def train(
    side: Side,
    steps: Iterable[int],
    batches_of: Callable[[int], Sequence[Any]],
    loss_of: Callable[[Any, Any], Tensor],
    max_norm: float | None = None,
) -> None:
    """Take steps, each over the micro-batches of all ranks: j belongs to rank j mod world size."""
    world_size = side.world_size if isinstance(side, AsPlain) else side.optimizer.world_size
    for step in steps:
        for number, batch in enumerate(batches_of(step)):
            if number % world_size in side.ranks:
                side.train(lambda model, _, batch=batch: loss_of(model, batch), ranks=[number % world_size])  # type: ignore[misc]
        if max_norm is not None:
            side.clip(max_norm)
        side.step()
        side.clear()
