"""From the gradients of a rank's backwards to mean gradients at their owners.

Knows: when a round is due. A backward outside `no_sync` is one, and so is what `no_sync` left pending when somebody
needs it. Does not know: what stands in p.grad, how the optimizer uses a gradient, how bytes travel.

What no bucket can tell is agreed in `settle`: how many rounds each rank entered (a rank behind catches up), which
parameters were used, what is pending, the divisor, and errors that one rank alone found. See `progress` for what may
happen when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from collectives import Chain, Collective, Kind, Tag, Transport
from collectives.torch_internals import amp_unscale_

from ..consistency import gather_slot
from ..core.layout import Layout, Piece
from ..core.parameter_specs import changed
from ..core.stages import Placement, Stage
from ..events import Event
from ..parameters.released import as_plain
from ..streams import Streams
from .accumulator import GradientStore
from .agreement import Record, check
from .backward_schedule import Rounds
from .grad_access import Shown
from .grad_phase import Phase, Progress
from .hooks import GradientHooks
from .join import Options, Turns


class Reducer:
    """The gradients of all parameters of one optimizer on one rank."""

    def __init__(
        self,
        layout: Layout,
        stage: Stage,
        transport: Transport,
        shards: Transport,
        collective: Collective,
        streams: Streams,
        *,
        means_may_be_shown: bool,
    ) -> None:
        """``shards``: the ranks that own the slices of buckets; ``means_may_be_shown``: of `Shown`."""
        self._stage, self._transport, self._collective = stage, transport, collective
        self._place, self._streams = shards.rank, streams
        self._rounds = Rounds(layout, stage, transport, shards, collective)
        self._progress = Progress(transport.world_size)
        self._shown = Shown(self, stage, self._rounds, self._progress, means_may_be_shown=means_may_be_shown)
        self._meeting = 0
        rank = transport.rank_label
        self._agreeing, self._catching_up = Event("agree", rank), Event("catch_up", rank)
        self._unscaling = Event("unscale", rank)
        self._sync = True
        self._unscaled: Tensor | None = None  # what a `GradScaler` was last told into
        self._turns: Turns | None = None  # inside `join`
        self._stranger: str | None = None  # who had a gradient of the user's before the backward under way
        self.hooks = GradientHooks(self, exclusive=stage.parameters is Placement.SHARD, ahead=self.means_are_shown)

    @property
    def means_are_shown(self) -> bool:
        """p.grad is the mean after each round."""
        return self._shown.means_are_shown

    @property
    def used(self) -> Sequence[bool]:
        """Of each parameter, whether some rank used it, once that was agreed."""
        return self._progress.used

    @property
    def divisor(self) -> float:
        """Of the next settling."""
        return self._progress.divisor

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
        self._progress.used += [False] * len(parameters)
        self._shown.extend(parameters, layout)
        for index, parameter in enumerate(parameters, first):
            self.hooks.watch(parameter, index)

    # -- events of autograd (the listener of `GradientHooks`) ---------------------------------------------------------

    def backward_is_near(self) -> None:
        self._streams.wait_for_previous()
        self.finish_interrupted()
        self._stranger = self._shown.look()
        if self.means_are_shown:
            self._shown.hide()

    def backward_began(self) -> None:
        self._transport.check()
        try:
            self._check_open()
            problem = self._assigned(self._stranger) or self._shown.edited()
            if problem is not None:
                self._fail(problem)
        except RuntimeError:
            self._shown.show()
            raise
        self._rounds.begin(is_round=self._sync)

    def gradient_ready(self, index: int, gradient: Tensor) -> None:
        self._streams.wait_for_previous()
        if gradient.layout is not torch.strided:
            self.parameters[index].grad = None
            raise RuntimeError(
                f"rank {self._transport.rank}: the gradient of {self._name(index)} is {gradient.layout}: sparse "
                "gradients are not supported; build the Embedding with sparse=False"
            )
        self._progress.used[index] = True
        refused = self._shown.put_placeholder(index)
        if refused is not None:
            problem = changed(self.parameters[index], self._rounds.layout.parameters[index])
            raise RuntimeError(
                f"rank {self._transport.rank}: {problem or f'the gradient of {self._name(index)}: {refused}'}"
            ) from refused
        self._rounds.arrived(index, gradient)

    def backward_ended(self) -> None:
        self._streams.wait_for_previous()
        self._complete()
        self._shown.show()

    def outside_backward(self) -> None:
        self._shown.show()

    def gradient_zeroed(self, index: int) -> None:
        self._shown.zeroed(index)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Do what is left of the backward under way."""
        self._rounds.complete(self._round_is_over)

    def _round_is_over(self) -> None:
        """The sums are others now, and so are the means."""
        self._progress.means_divisor = None
        if self.means_are_shown:
            self._gather_means()

    def _gather_means(self) -> None:
        """Give every rank the means, and agree whose gradient exists at all: the hash of the plain loop sees None."""
        tag = Tag(Kind.EXCHANGE, "which parameters were used", self._rounds.number)
        with self._agreeing():
            records = [Record.unpack(r) for r in self._transport.exchange(self._record().pack(), tag)]
        self._progress.agree_used([record.used for record in records])
        if any(record.divisor != self.divisor for record in records):
            self._progress.means_divisor = None  # nobody's p.grad would be right; `settle` agrees and comes back
            return
        stores = [store for store in self.stores if store.has_sum]
        Chain(store.gather_means(self._collective, self._rounds.number, self.divisor) for store in stores).wait()
        self._progress.means_divisor = self.divisor

    def _empty_round(self, also: Sequence[int] = ()) -> None:
        """A round of the others', to which this rank has nothing to add but what it still holds."""
        with self._catching_up():
            self._rounds.begin(is_round=True, also=also)
            self._complete()
            self._shown.show()

    def finish_interrupted(self) -> None:
        """Complete the round of a backward that an exception left, so that collectives stay matched."""
        if not self.hooks.interrupted:
            return
        cleared = self._shown.cleared()  # since then, and so after what is completed here
        self.hooks.forget()
        if self._transport.broken:
            self._rounds.abandon()
            return
        self._complete()
        self._shown.forget(cleared)
        self._shown.show()

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
        used = [record.used for record in records]
        if not self._progress.is_open:
            self._progress.agree_used(used)
            return
        pending = sorted({bucket for record in records for bucket in record.pending})
        if pending:
            self._empty_round(pending)
        self._progress.agree_used(used)
        if self._stage.means_are_gathered:
            if self._progress.means_divisor != self.divisor:
                self._gather_means()
        else:
            for store in self.stores:
                store.divide(self.divisor)
        self._progress.settled(purpose)
        self._shown.show()

    def agree(
        self,
        purpose: str,
        problem: str | None = None,
        *,
        scale: float | None = None,
        options: Mapping[str, int] | None = None,
    ) -> list[Record]:
        """Meet all ranks and compare what they hold. Collective; raises the same error on every rank."""
        self._streams.wait_for_previous()
        self.finish_interrupted()
        stranger = self._shown.look()
        if self._progress.is_open and self._progress.means_divisor != self.divisor:  # the means will be gathered anew
            problem = problem or self._shown.edited()
        problem = problem or self._assigned(stranger)
        with self._agreeing():
            self._meet(purpose)
            tag = Tag(Kind.EXCHANGE, purpose, self._rounds.number, self._meeting)
            record = self._record(problem, scale, options)
            records = [Record.unpack(r) for r in self._transport.exchange(record.pack(), tag)]
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
        known = self._progress
        return Record(
            known.divisor,
            scale,
            dict(options or {}),
            known.phase.name.lower(),
            self._rounds.pending,
            problem,
            bytes(known.used),
            trainable,
        )

    # -- errors -------------------------------------------------------------------------------------------------------

    def _name(self, index: int) -> str:
        return repr(self._rounds.layout.parameters[index].name)

    def _check_open(self) -> None:
        if not self._progress.is_open:
            name = self._name(min(self._progress.stale))
            raise RuntimeError(
                f"rank {self._transport.rank}: backward() after {self._progress.settled_by} without zero_grad(): the "
                f"gradient of {name} was already divided; call optimizer.zero_grad() first"
            )

    def _assigned(self, stranger: str | None) -> str | None:
        if stranger is None:
            return None
        return (
            f"the gradient of {stranger!r} was assigned from outside: only backward() can say what this rank "
            "contributes"
        )

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
                self._shown.look()
            self._meet(purpose)

        self.finish_interrupted()
        self._shown.look()
        self._rounds.at_the_end = not gathers_nothing
        self._turns, self._shown.inside_join = Turns(self._transport, meet, groups), True
        self._shown.hide()
        return self._turns

    def leave(self) -> None:
        """What `join` began is over."""
        self._turns, self._shown.inside_join, self._rounds.at_the_end = None, False, False
        self._shown.show()

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
                begin, _ = self._stage.stepped(store.bucket, self._place)
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
        with self._unscaling(), self.in_turn("unscale", inverse=factor):
            self.settle("GradScaler.unscale_()", scale=1 / factor if factor else math.inf)
            self._unscale(found, inverse)
        self._unscaled = found

    def _unscale(self, found: Tensor, inverse: Tensor) -> None:
        here = torch.zeros_like(found)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for piece in self._settled(lambda store: store.bucket.pieces(*self._stage.stepped(store.bucket, self._place))):
            by_dtype.setdefault(piece.dtype, []).append(piece)
        for pieces in by_dtype.values():
            amp_unscale_(pieces, here, inverse)
        mine = bytes([bool(here.item())])  # host synchronisation: every rank must take or skip the same step
        tag = Tag(Kind.EXCHANGE, "gradients that are not finite", self._rounds.number, self._meeting)
        if any(told[0] for told in self._transport.exchange(mine, tag)):
            found.fill_(1.0)

    def stepped(self) -> None:
        """A step has used the gradients."""
        self._progress.stepped()

    def set_divisor(self, value: float) -> None:
        """Set the divisor of the next settling."""
        if not self.hooks.interrupted:
            self._shown.look()
        if self._progress.phase is Phase.SETTLED:
            raise RuntimeError(
                f"the divisor was set after {self._progress.settled_by}, which has already divided by "
                f"{self.divisor:g}: set it before the first clip, unscale or step of a step"
            )
        self._progress.divisor = value
        if self.means_are_shown and self._progress.is_open:
            self._shown.show()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear every gradient, or set those that exist to zero."""
        if self.hooks.inside_backward:
            raise RuntimeError("zero_grad() inside a backward")
        self.finish_interrupted()
        self._shown.zero_grad(set_to_none)

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
        if self._shown.means_are_true:
            whole = store.mean_view(slot_number).as_strided((slot.numel,), (1,)).clone()
        else:
            total = store.running_sum()
            assert total is not None  # used by some rank, and nothing is pending
            tag = Tag(Kind.ALL_GATHER, purpose, self._rounds.number, store.bucket.index)
            whole = gather_slot(self._collective, self._place, store.bucket, slot, (store.low, total), tag)
            if self._progress.is_open:
                whole.div_(self.divisor)
        return whole.as_strided(spec.shape, spec.stride)

    def close(self) -> None:
        """Take the hooks away; gradients that this rank holds whole become the user's own."""
        self.hooks.remove()
        self._shown.release()
        self._rounds.close()
