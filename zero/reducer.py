"""From the gradients of a rank's backwards to mean gradients at their owners.

Knows: when a round is due, and what stands in p.grad. A backward outside `no_sync` is a round, and so is what `no_sync`
left pending when somebody needs it. Does not know: how the optimizer uses a gradient, or how bytes travel.

    OPEN ------------ settle (clip, unscale, step) ----------> SETTLED --- step ---> STEPPED
      ^  backwards add                                            |                     |
      +----------------- every gradient was cleared <-------------+---------------------+

What no bucket can tell is agreed in `settle`: how many rounds each rank entered (a rank behind catches up), which
parameters were used, what is pending, the divisor, and errors that one rank alone found.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from collectives import Chain, Collective, Kind, Tag, Transport

from .agreement import Record, check
from .faces import Faces
from .gradients import GradientStore
from .hooks import GradientHooks
from .join import Options, Turns
from .layout import Layout, Piece
from .released import as_plain
from .replicas import gather_slot
from .rounds import Rounds
from .stages import Placement, Stage, all_zero, read_scalars, seen_at_once


class Phase(Enum):
    """What may happen to the gradients next."""

    OPEN = "backwards add to them"
    SETTLED = "they are means, perhaps clipped"
    STEPPED = "a step has used them"


class Reducer:
    """The gradients of all parameters of one optimizer on one rank."""

    def __init__(
        self, layout: Layout, stage: Stage, transport: Transport, collective: Collective, *, means_may_be_shown: bool
    ) -> None:
        """``means_may_be_shown``: whole means, where the stage has them, have the dtype that p.grad must have."""
        self._stage, self._transport, self._collective = stage, transport, collective
        self._means_may_be_shown = stage.means_are_gathered and means_may_be_shown
        self._rounds = Rounds(layout, stage, transport, collective)
        self.used: list[bool] = []
        self.phase = Phase.OPEN
        self.divisor: float = transport.world_size
        self._faces = Faces(self)
        self._meeting = 0
        self._sync = True
        self._means_divisor: float | None = None
        self._stale: set[int] = set()  # gradients that a settled phase waits to be cleared
        self._settled_by = ""
        self._unscaled: Tensor | None = None  # what a `GradScaler` was last told into
        self._turns: Turns | None = None  # inside `join`
        self._stranger: str | None = None  # who had a gradient of the user's before the backward under way
        self.hooks = GradientHooks(self, exclusive=stage.parameters is Placement.SHARD, ahead=self.means_are_shown)

    @property
    def means_are_shown(self) -> bool:
        """p.grad is the mean after each round. Not inside `join`: what is done to it would not be done where a rank
        left."""
        return self._means_may_be_shown and self._turns is None

    @property
    def parameters(self) -> list[Tensor]:
        """In the layout's order."""
        return self._rounds.parameters

    @property
    def stores(self) -> list[GradientStore]:
        """Of all buckets."""
        return self._rounds.stores

    def extend(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        """Take up further parameters, which ``layout`` has in further buckets."""
        first = len(self.parameters)
        self._rounds.extend(parameters, layout)
        self.used += [False] * len(parameters)
        self._faces.extend(parameters, layout.parameters[first:])
        for index, parameter in enumerate(parameters, first):
            self.hooks.watch(parameter, index)

    # -- events of autograd (the listener of `GradientHooks`) ---------------------------------------------------------

    def backward_is_near(self) -> None:
        self.finish_interrupted()
        self._stranger = self._look()
        if self.means_are_shown:
            self._faces.hide()  # no mean may be where autograd would add to it

    def backward_began(self) -> None:
        self._transport.check()
        try:
            self._check_open()
            problem = self._assigned(self._stranger) or self._edited()
            if problem is not None:
                self._fail(problem)
        except RuntimeError:
            self._show()
            raise
        self._rounds.begin(is_round=self._sync)

    def gradient_ready(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            self.parameters[index].grad = None
            raise RuntimeError(
                f"rank {self._transport.rank}: the gradient of {self._name(index)} is {gradient.layout}: sparse "
                "gradients are not supported; build the Embedding with sparse=False"
            )
        self.used[index] = True
        self._faces.put_placeholder(index)
        self._rounds.arrived(index, gradient)

    def backward_ended(self) -> None:
        self._complete()
        self._show()

    def outside_backward(self) -> None:
        self._show()

    def gradient_zeroed(self, index: int) -> None:
        self._zero(index, self._used_is_known())
        self._renewed(index)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Do what is left of the backward under way."""
        self._rounds.complete(self._round_is_over)

    def _round_is_over(self) -> None:
        """The sums are others now, and so are the means."""
        self._means_divisor = None
        if self.means_are_shown:
            self._gather_means()

    def _gather_means(self) -> None:
        """Give every rank the means, and agree whose gradient exists at all: the hash of the plain loop sees None."""
        tag = Tag(Kind.EXCHANGE, "which parameters were used", self._rounds.number)
        records = [Record.unpack(r) for r in self._transport.exchange(self._record().pack(), tag)]
        self._agree_used(records)
        if any(record.divisor != self.divisor for record in records):
            self._means_divisor = None  # nobody's p.grad would be right; `settle` agrees and comes back
            return
        stores = [store for store in self.stores if store.has_sum]
        Chain(store.gather_means(self._collective, self._rounds.number, self.divisor) for store in stores).wait()
        self._means_divisor = self.divisor

    def _empty_round(self, also: Sequence[int] = ()) -> None:
        """A round of the others', to which this rank has nothing to add but what it still holds."""
        self._rounds.begin(is_round=True, also=also)
        self._complete()
        self._show()

    def finish_interrupted(self) -> None:
        """Complete the round of a backward that an exception left, so that collectives stay matched."""
        if not self.hooks.interrupted:
            return
        cleared = self._faces.look().cleared  # since then, and so after what is completed here
        self.hooks.forget()
        if self._transport.broken:
            self._rounds.abandon()
            return
        self._complete()
        self._forget(cleared)
        self._show()

    # -- agreement ----------------------------------------------------------------------------------------------------

    def settle(
        self,
        purpose: str,
        problem: str | None = None,
        *,
        scale: float | None = None,
        options: Mapping[str, int] | None = None,
    ) -> None:
        """Turn the sums into means, once. Collective; ``purpose`` is what errors call it.

        ``problem``: an error that this rank alone may have found; every rank raises it, and nothing has changed.
        ``scale``: the loss scale that made the gradients, where it is about to be taken out; ``options``: of `Record`.
        """
        if self.hooks.inside_backward:
            raise RuntimeError(f"{purpose} inside a backward")
        if not self._sync:
            raise RuntimeError(
                f"{purpose} inside no_sync(): leave the block first, what it left pending is reduced then"
            )
        records = self.agree(purpose, problem, scale=scale, options=options)
        if not self._is_open():
            self._agree_used(records)
            return
        pending = sorted({bucket for record in records for bucket in record.pending})
        if pending:
            self._empty_round(pending)
        self._agree_used(records)
        if self._stage.means_are_gathered:
            if self._means_divisor != self.divisor:
                self._gather_means()
        else:
            for store in self.stores:
                store.divide(self.divisor)
        self._stale = {index for index, used in enumerate(self.used) if used}
        self.phase, self._settled_by = Phase.SETTLED if self._stale else Phase.OPEN, purpose
        self._show()

    def _is_open(self) -> bool:
        return self.phase is Phase.OPEN

    def agree(
        self,
        purpose: str,
        problem: str | None = None,
        *,
        scale: float | None = None,
        options: Mapping[str, int] | None = None,
    ) -> list[Record]:
        """Meet all ranks and compare what they hold. Collective; raises the same error on every rank."""
        self.finish_interrupted()
        stranger = self._look()
        if self._is_open() and self._means_divisor != self.divisor:  # the means will be gathered anew
            problem = problem or self._edited()
        problem = problem or self._assigned(stranger)
        self._meet(purpose)
        tag = Tag(Kind.EXCHANGE, purpose, self._rounds.number, self._meeting)
        records = [
            Record.unpack(r) for r in self._transport.exchange(self._record(problem, scale, options).pack(), tag)
        ]
        check(records, purpose, self._name)
        return records

    def _meet(self, purpose: str) -> None:
        self._meeting += 1
        self._transport.meet(Tag(Kind.MEET, purpose, self._rounds.number, self._meeting), self._empty_round)

    def _record(
        self, problem: str | None = None, scale: float | None = None, options: Mapping[str, int] | None = None
    ) -> Record:
        with as_plain():
            trainable = bytes([p.requires_grad for p in self.parameters])
        phase = self.phase.name.lower()
        return Record(
            self.divisor, scale, dict(options or {}), phase, self._rounds.pending, problem, bytes(self.used), trainable
        )

    def _agree_used(self, records: Sequence[Record]) -> None:
        merged = functools.reduce(operator.or_, (int.from_bytes(record.used, "little") for record in records))
        self.used[:] = map(bool, merged.to_bytes(len(self.used), "little"))

    # -- p.grad -------------------------------------------------------------------------------------------------------

    def _name(self, index: int) -> str:
        return repr(self._rounds.layout.parameters[index].name)

    def _means_are_true(self) -> bool:
        """True when every rank holds the means of all that was added, divided by the divisor."""
        return self._stage.means_are_gathered and not self._rounds.pending and self._means_divisor == self.divisor

    def _show(self) -> None:
        """Put into every p.grad what is true now: the mean, a placeholder, or None."""
        if not self.means_are_shown:
            self._faces.shelter([used or seen for used, seen in zip(self.used, self._rounds.seen, strict=True)])
            return
        means = self._means_are_true()
        for index in range(len(self.parameters)):
            store, slot = self._rounds.places[index]
            if means and store.has_sum:
                self._faces.put(index, store.mean_view(slot) if self.used[index] else None)
            elif self.used[index] or self._rounds.seen[index]:
                self._faces.put_placeholder(index)

    def _look(self) -> str | None:
        """Take note of what the user did to gradients since they were shown; the name of one that is a stranger's."""
        changes = self._faces.look()
        self._forget(changes.cleared)
        for index, gradient in changes.replaced:
            store, slot = self._rounds.places[index]
            store.mean_view(slot).copy_(gradient)
        if self.means_are_shown:  # real tensors, which may have been zeroed in place
            stale = sorted(self._stale)
            places = [self._rounds.places[index] for index in stale]
            # host synchronisation: one for all, where means that were settled are still there
            zero = all_zero([store.mean_view(slot) for store, slot in places])
            for index in itertools.compress(stale, zero):
                self._zero(index, known=True)
                self._renewed(index)
        return changes.stranger

    def _forget(self, cleared: Sequence[int]) -> None:
        """The user set these gradients to None."""
        for index in cleared:
            store, slot = self._rounds.places[index]
            store.clear_slot(slot)
            self.used[index] = self._rounds.seen[index] = False
            self._renewed(index)
        if cleared and not any(True for _ in self._faces.held()):
            self._clear()

    def _clear(self) -> None:
        """No parameter has a gradient any more."""
        self.used = [False] * len(self.parameters)
        self._rounds.clear()

    def _renewed(self, index: int) -> None:
        self._stale.discard(index)
        if not self._stale:
            self.phase = Phase.OPEN

    def _check_open(self) -> None:
        if not self._is_open():
            name = self._name(min(self._stale))
            raise RuntimeError(
                f"rank {self._transport.rank}: backward() after {self._settled_by} without zero_grad(): the gradient "
                f"of {name} was already divided; call optimizer.zero_grad() first"
            )

    def _assigned(self, stranger: str | None) -> str | None:
        if stranger is None:
            return None
        return (
            f"the gradient of {stranger!r} was assigned from outside: only backward() can say what this rank "
            "contributes"
        )

    def _edited(self) -> str | None:
        """What is wrong where a mean was edited that will not be the last one."""
        if not self.means_are_shown or self._means_divisor is None or not self._is_open():
            return None
        for store in self._doubtful(self._means_divisor):
            for slot in store.edits(self._means_divisor, self.used):
                name = self._name(store.bucket.slots[slot].parameter)
                return (
                    f"the gradient of {name} was edited after a backward, and a further backward or another divisor "
                    "would lose the edit; edit gradients after the last backward of a step"
                )
        return None

    def _doubtful(self, divisor: float) -> list[GradientStore]:
        """Stores whose means may have been edited since they were gathered."""
        stores = [store for store in self.stores if store.shows_means]
        if not stores or seen_at_once(torch.device(stores[0].bucket.device)):
            return stores
        # host synchronisation: one for all, in a backward that is not the first since gradients were cleared
        return list(itertools.compress(stores, read_scalars([store.edited(divisor) for store in stores])))

    def _fail(self, problem: str) -> None:
        """Raise what this rank alone may have found where the others cannot be asked: they are told."""
        text = f"rank {self._transport.rank}: {problem}"
        if self._transport.world_size > 1:
            self._transport.abort(text)
        raise RuntimeError(text)

    # -- for the optimizer --------------------------------------------------------------------------------------------

    def join(self, groups: Sequence[Options], *, gathers_nothing: bool) -> Turns:
        """From now on calls are told, until `leave`. ``gathers_nothing``: no forward and no backward is told."""
        if self._turns is not None:
            raise RuntimeError("join() inside join()")

        def meet(purpose: str) -> None:
            if not self.hooks.inside_backward:
                self.finish_interrupted()
                self._look()
            self._meet(purpose)

        self.finish_interrupted()
        self._look()
        self._rounds.at_the_end = not gathers_nothing
        self._turns = Turns(self._transport, meet, groups)
        self._faces.hide()
        return self._turns

    def leave(self) -> None:
        """What `join` began is over."""
        self._turns, self._rounds.at_the_end = None, False
        self._show()

    @property
    def joining(self) -> bool:
        """Inside `join`."""
        return self._turns is not None

    def in_turn(self, name: str, **arguments: Any) -> AbstractContextManager[None]:
        """Around a call that all ranks make: those that have nothing more to do inside `join` make it, too."""
        return nullcontext() if self._turns is None else self._turns.taken(name, arguments, self.divisor)

    def owned(self) -> list[Tensor]:
        """The settled gradients of this rank's own slices, as pieces of the parameters that some rank used."""
        return self._settled(lambda store: store.pieces)

    def any_is_double(self) -> bool:
        """True where a gradient that some rank used is added up in fp64."""
        doubles = [store.bucket for store in self.stores if store.bucket.dtypes.accumulate is torch.float64]
        return any(self.used[slot.parameter] for bucket in doubles for slot in bucket.slots)

    def _settled(self, pieces_of: Callable[[GradientStore], Sequence[Piece]]) -> list[Tensor]:
        found = []
        for store in self.stores:
            gradient = store.settled()
            if gradient is not None:
                begin, _ = self._stage.stepped(store.bucket, self._transport.rank)
                for piece in pieces_of(store):
                    if self.used[store.bucket.slots[piece.slot].parameter]:
                        found.append(gradient[piece.begin - begin : piece.end - begin])
        return found

    def unscale(self, found: Tensor, inverse: Tensor) -> None:
        """Take the loss scale out of the means, and tell every rank whether any of all is not finite. Collective.

        A `GradScaler` asks once for each dtype of gradients; all are answered at once.
        """
        if found is self._unscaled:
            return
        factor = inverse.item()  # host synchronisation: ranks compare it, once a step
        with self.in_turn("unscale", inverse=factor):
            self.settle("GradScaler.unscale_()", scale=1 / factor if factor else math.inf)
            self._unscale(found, inverse)
        self._unscaled = found

    def _unscale(self, found: Tensor, inverse: Tensor) -> None:
        here = torch.zeros_like(found)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        rank = self._transport.rank
        for piece in self._settled(lambda store: store.bucket.pieces(*self._stage.stepped(store.bucket, rank))):
            by_dtype.setdefault(piece.dtype, []).append(piece)
        for pieces in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(pieces, here, inverse)
        mine = bytes([bool(here.item())])  # host synchronisation: every rank must take or skip the same step
        tag = Tag(Kind.EXCHANGE, "gradients that are not finite", self._rounds.number, self._meeting)
        if any(told[0] for told in self._transport.exchange(mine, tag)):
            found.fill_(1.0)

    def stepped(self) -> None:
        """A step has used the gradients."""
        self.phase, self._settled_by = Phase.STEPPED if self._stale else Phase.OPEN, "step()"

    def set_divisor(self, value: float) -> None:
        """Set the divisor of the next settling."""
        if not self.hooks.interrupted:
            self._look()
        if self.phase is Phase.SETTLED:
            raise RuntimeError(
                f"the divisor was set after {self._settled_by}, which has already divided by {self.divisor:g}: set it "
                "before the first clip, unscale or step of a step"
            )
        self.divisor = value
        if self.means_are_shown and self._is_open():
            self._show()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear every gradient, or set those that exist to zero."""
        if self.hooks.inside_backward:
            raise RuntimeError("zero_grad() inside a backward")
        self.finish_interrupted()
        if set_to_none:  # whatever was done to them
            self._faces.clear()  # also what was there before this object
            self._clear()
        else:
            self._look()
            known = self._used_is_known()
            for index in range(len(self.parameters)):
                if self.used[index] or self._rounds.seen[index]:
                    self._zero(index, known)
                mean = self._faces.mean(index)
                if mean is not None:
                    mean.zero_()
        self._stale = set()
        self.phase = Phase.OPEN

    def _used_is_known(self) -> bool:
        """True when `used` says what all ranks used, rather than this one."""
        return (self.means_are_shown and not self._rounds.pending) or self.phase is not Phase.OPEN

    def _zero(self, index: int, known: bool) -> None:
        store, slot = self._rounds.places[index]
        if not self.used[index]:
            store.clear_slot(slot)
        elif known:
            store.zero_slot(slot)
        else:
            store.contribute_zero(slot)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's own sum, and are not rounds."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def full_gradient(self, index: int) -> Tensor | None:
        """The whole mean gradient of a parameter; None where no rank used it. Collective."""
        purpose = f"full_grad of {self._name(index)}"
        records = self.agree(purpose)
        store, slot_number = self._rounds.places[index]
        if any(record.pending for record in records):
            raise RuntimeError(f"{purpose}: what no_sync() left is not reduced yet; run a backward outside it, or clip")
        if not any(record.used[index] for record in records):
            return None
        spec, slot = self._rounds.layout.parameters[index], store.bucket.slots[slot_number]
        if self._means_are_true():
            whole = store.mean_view(slot_number).as_strided((slot.numel,), (1,)).clone()
        else:
            total = store.running_sum()
            assert total is not None  # used by some rank, and nothing is pending
            tag = Tag(Kind.ALL_GATHER, purpose, self._rounds.number, store.bucket.index)
            whole = gather_slot(self._collective, store.bucket, slot, (store.low, total), tag)
            if self.phase is Phase.OPEN:
                whole.div_(self.divisor)
        return whole.as_strided(spec.shape, spec.stride)

    def close(self) -> None:
        """Take the hooks away; gradients that this rank holds whole become the user's own."""
        self.hooks.remove()
        self._faces.release()
        self._rounds.close()
