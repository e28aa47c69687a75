"""The calls of an optimizer about whole tensors, and what every call checks first: a part of the engine.

Knows: what ranks agree on before whole tensors are gathered or overwritten. Does not know: steps, the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from collectives import as_a_whole
from collectives.torch_internals import current_graph_task_id

from .consistency import compare
from .parameters.own_storages import own_storages
from .parts import Parts
from .runtime.compiled_calls import untraced_context
from .state.gather import gather_master
from .state.plain_dicts import PlainDicts

TAKEN_OVER = "a newer ZeroOptimizer took over parameters of this one"
_Result = TypeVar("_Result")


def joinable(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a method so that, inside `join`, ranks that have run out of batches call it, too."""

    @functools.wraps(method)
    def call(self: WholeTensorCalls, **arguments: Any) -> _Result:
        self.check()
        with self._joining.broadcast(method.__name__, **arguments):
            return method(self, **arguments)

    return call


class WholeTensorCalls:
    """The calls about whole tensors. Every method is collective unless it is marked as local."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._transport, self._storage, self._reducer = parts.transport, parts.storage, parts.reducer
        self._joining, self.watchers = parts.joining, parts.update.watchers
        self.averages, self._gradients, self._full_state = parts.averages, parts.gradients, parts.full_state
        self.dicts = PlainDicts(parts.stage, parts.storage, parts.user_optimizers, parts.transport, parts.shard_group)
        self._closed = ""  # why the optimizer cannot be used any more
        self._gathered = 0  # blocks of `gathered` around this moment

    # -- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `RuntimeError` if the optimizer cannot be used any more, or not in this process. Local."""
        self.check_usable()
        self._transport.check_process()

    def check_usable(self) -> None:
        """Do as `check`, but allow calls in a process that was forked from a rank's. Local."""
        self._check_not_closed()
        self.parts.streams.wait_for_previous()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"this optimizer is closed: {self._closed}; build a new optimizer")
        if self.parts.superseded:
            raise RuntimeError(f"{TAKEN_OVER}: use that, or build a new one")

    def _check_rank(self, to: int | None, purpose: str) -> None:
        if to is None:
            return
        if isinstance(to, bool) or not isinstance(to, int):
            raise TypeError(f"{purpose}: to must be the number of a rank, or None for all, not {to!r}")
        if not 0 <= to < self._transport.world_size:
            raise ValueError(f"{purpose}: rank {to} is not one of the {self._transport.world_size} ranks")

    def _is_free(self) -> bool:
        return not self._gathered and self._storage.unit_hooks.end_iteration()

    def _check_between_steps(self, purpose: str) -> None:
        self.check()
        self.averages.refuse_applied(purpose)
        if current_graph_task_id() >= 0 or self._reducer.hooks.inside_backward or self._joining.active:
            raise RuntimeError(f"{purpose} inside a backward or inside join(): leave it first")

    # -- whole tensors ------------------------------------------------------------------------------------------------

    @joinable
    def full_grad(self, index: int) -> Tensor | None:
        """Return a copy of the whole mean gradient of a parameter; None if no rank used it."""
        return self._gradients.read(*self._storage.slot_of(index))

    def set_full_grad(self, index: int, gradient: Tensor | None, *, given: bool = True) -> None:
        """Replace the mean gradient of a parameter; None: it has none."""
        self.check()
        self.averages.refuse_applied("set_full_grad()")
        with self._joining.broadcast("set_full_grad", index=index):
            self._gradients.replace(*self._storage.slot_of(index), gradient, given=given)

    @joinable
    def full_master(self, index: int) -> Tensor:
        """Return a copy of the whole master weights of a parameter."""
        spec = self._storage.layout.parameters[index]
        self._reducer.check_consistency(f"full_master of {spec.name!r}", self._storage.diagnose())
        bucket, number = self._storage.slot_of(index)
        return gather_master(bucket, number, self.parts.shard_group.rank, self.parts.collective)

    @joinable
    def full_state_dict(self, to: int | None, masters: bool) -> dict[str, Any] | None:
        """Return the model's whole state dict on rank ``to``, or on every rank."""
        self._check_rank(to, "full_state_dict")
        problem = "full_state_dict() inside gathered(): leave it first" if self._gathered else None
        return self._full_state.gather(to, problem, masters=masters)

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Overwrite the model with the state dict of the first rank that has one."""
        purpose = "load_full_state_dict()"
        self._check_between_steps(purpose)
        problem = None if self._is_free() else f"{purpose} inside gathered() or inside a forward: leave it first"
        self.load(self._full_state.agree(state_dict, problem), f"in {purpose}")

    @joinable
    def update_average(self, average: str) -> None:
        """Take the weights of this moment into an average. Without a message, outside `join`."""
        self.averages.update(average)

    @joinable
    def gather_average(self, average: str, to: int | None) -> dict[str, Tensor] | None:
        """Return a whole average on rank ``to``, or on every rank."""
        self._check_rank(to, "gather")
        return self.averages.gather(average, to)

    @untraced_context
    def apply_average(self, average: str) -> Iterator[None]:
        """Return a context in which the model's weights are an average."""
        purpose = f"applied() of the average {average!r}"
        self._check_between_steps(purpose)
        problem = None if self._is_free() else f"{purpose} inside gathered() or inside a forward: leave it first"
        with self.averages.applied(average, purpose, problem), self.parts.streams.block():
            yield

    @untraced_context
    def gathered(self, chosen: Sequence[Tensor] | None, write: bool) -> Iterator[None]:
        """Return a context in which ``chosen`` parameters (None: all) are whole.

        With ``write`` every rank has rank 0's values after the block.
        """
        self.check()
        positions = self._storage.positions(chosen) if self._joining.active else None
        with ExitStack() as block:
            with self._joining.broadcast("gathered", positions=positions):
                block.enter_context(self._storage.gathered(chosen))
            self._gathered += 1
            try:
                with own_storages(self._storage.views(chosen)):
                    yield
            finally:
                self._gathered -= 1
                with self._joining.broadcast("end of gathered", positions=positions, write=write):
                    if write:
                        self._overwrite(chosen)

    def _overwrite(self, chosen: Sequence[Tensor] | None) -> None:
        self._reducer.check_consistency("gathered(write=True)", self._storage.diagnose())
        self._storage.overwrite(chosen)

    @joinable
    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks."""
        self._reducer.check_consistency("broadcast_buffers()", self._storage.diagnose())
        self._storage.broadcast_buffers()

    @joinable
    def check_replicas(self) -> str:
        """Compare the parameters over the ranks, and return the SHA-256 over them."""
        self._reducer.check_consistency("check_replicas()", self._storage.diagnose())
        return compare(self._transport, self._storage.fingerprints(), "check_replicas()")

    def load(self, read: Callable[[], None], doing: str = "in restore()") -> None:
        """Let ``read`` overwrite all parameters and states, when all ranks have agreed to it."""
        self.before_load()
        self._storage.loading()
        with torch.no_grad(), as_a_whole(self._transport, doing, Exception):
            read()
        self._storage.stepped()
        self.dicts.forget()

    def before_load(self) -> None:
        """Return when all states may change. Local."""
        for watcher in self.watchers:
            for bucket in self._storage.buckets:
                watcher.before_update(bucket.spec.index)
