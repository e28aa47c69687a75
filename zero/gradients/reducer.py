"""From the gradients of a rank's backwards to mean gradients at their owners.

Knows: when a round is due. A backward outside `no_sync` is one; contributions that `no_sync` left pending are reduced
in a further round when they are needed. Does not know: the tensors in p.grad, how the optimizer uses a gradient, how
bytes are sent.

`finalize_grads` agrees on all that no single bucket shows: how many rounds each rank entered (a rank behind catches
up), which parameters were used, which buckets are pending, the divisor, and errors that one rank alone found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from collectives import Chain, Collective, Kind, MismatchError, Tag, Transport, behind_a_meeting

from ..core.stage import Placement, Stage
from ..runtime.backward_tracker import BackwardTracker
from ..runtime.bucket import Bucket
from ..runtime.compiled_calls import untraced_context
from ..runtime.joining import Joining
from ..runtime.offload import wait_for_host
from ..runtime.profiler_ranges import ProfilerRange
from ..runtime.streams import Streams
from ..runtime.unit_order import UnitOrder
from .agreement import Agreement, Record
from .backward_schedule import BackwardSchedule, inside_backward
from .division import Division
from .grad_publisher import GradPublisher
from .hooks import GradientHooks
from .join import JoinProtocol, Options
from .reduced_grads import FoundInf, ReducedGrads
from .taking import GradientTaking


class Reducer:
    """The gradients of all parameters of one optimizer on one rank."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stage: Stage,
        transport: Transport,
        shard_group: Transport,
        collective: Collective,
        streams: Streams,
        backwards: BackwardTracker,
        joining: Joining,
        unit_order: UnitOrder,
        *,
        means_may_be_shown: bool,
    ) -> None:
        """``buckets``: the list itself, which may grow; ``shard_group``: the ranks that own their shards;
        ``unit_order``: of `Agreement`; ``means_may_be_shown``: of `GradPublisher`."""
        self._buckets, self._stage, self._transport, self._collective = buckets, stage, transport, collective
        self._shard_group, self._streams, self._joining = shard_group, streams, joining
        replicas = transport.world_size // shard_group.world_size
        self.schedule = BackwardSchedule(buckets, stage, transport, collective, replicas, joining)
        self.means, self._division = ReducedGrads(buckets), Division()
        self.publisher = GradPublisher(self, stage, self.schedule, joining, means_may_be_shown=means_may_be_shown)
        self._taking = GradientTaking(transport.rank, self.publisher.make_placeholder)
        self.agreement = Agreement(transport, shard_group.world_size, unit_order)
        events = (ProfilerRange(what, transport.rank_label) for what in ("agree", "catch_up", "unscale"))
        self._agreeing, self._catching_up, self._unscaling = events
        self._sync, self._found = True, FoundInf()
        self._assigned: str | None = None  # the error for a gradient that the user assigned before a backward
        exclusive = stage.parameters is Placement.SHARD
        self.hooks = GradientHooks(self, backwards, streams, exclusive=exclusive, ahead=self.means_are_shown)

    @property
    def means_are_shown(self) -> bool:
        """p.grad is the mean after each round."""
        return self.publisher.means_are_shown

    def watch(self, new: Sequence[Bucket]) -> None:
        """Begin to reduce the gradients of these new buckets."""
        for bucket in new:
            if not self._stage.grads_replicated:
                spec = bucket.spec
                device, dtype = torch.device(spec.device), spec.dtypes.accumulate_dtype
                self._division.prepare(device, dtype, offloaded=spec.offloaded)
            for slot in range(len(bucket.parameters)):
                self.hooks.watch(bucket, slot)
        if len({bucket.spec.device for bucket in self._buckets}) > 1:
            self.hooks.stay_ahead(self._buckets)

    # -- events of autograd (the listener of `GradientHooks`) ---------------------------------------------------------

    def backward_is_near(self) -> None:
        self._streams.wait_for_previous()
        self.finish_interrupted()
        self._assigned = self.publisher.detect_changes()
        if self.means_are_shown:
            self.publisher.withdraw()

    def backward_began(self) -> None:
        self._transport.check()
        try:
            self.schedule.check_open()
            problem = self._assigned or self.publisher.edited()
            if problem is not None:
                problem = f"rank {self._transport.rank}: {problem}"
                if self._transport.world_size > 1:
                    self._transport.abort(problem)  # the others cannot be asked whether they found one
                raise RuntimeError(problem)
        except RuntimeError:
            self.publisher.publish()
            raise
        self.schedule.begin(is_round=self._sync, shows_means=self.means_are_shown)

    def gradient_ready(self, bucket: Bucket, slot: int, gradient: Tensor) -> None:
        if self._streams.exist and self._streams.changed():
            self._streams.wait_for_previous()
        if bucket.left:
            self._taking.take_left(bucket)
        self._taking.take(bucket, slot, gradient)
        bucket.grad.missing -= 1
        if not bucket.grad.missing:
            self.schedule.arrived(bucket)

    def take_left(self) -> None:
        for bucket in self._buckets:
            if bucket.left:
                self._taking.take_left(bucket)

    def backward_ended(self) -> None:
        self._streams.wait_for_previous()
        self._complete()
        self._shard_group.pool.drop_cheap()
        self.publisher.publish()

    def gradient_zeroed(self, bucket: Bucket, slot: int) -> None:
        self.schedule.early.distrust()
        self.publisher.zeroed(bucket, slot)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Complete the reductions of the backward under way, and, at stage 0, the means. After an interrupt, call this
        again."""
        self.take_left()
        try:
            if self.schedule.complete():
                wait_for_host(bucket.spec for bucket in self._buckets)
                if self.means_are_shown:
                    self._agree_on_means()
                self.schedule.end_round()
        except MismatchError as error:
            raise MismatchError(f"{error} ({self.schedule.frozen_here()})") from error

    def _agree_on_means(self) -> None:
        """Agree which gradients exist, and gather the new means that are not gathered yet."""
        tag = Tag(Kind.EXCHANGE, "which parameters were used", self.schedule.number)
        with self._agreeing():
            own = replace(self._record(), gathered=self.schedule.early.divisor)
            records = [Record.unpack(r) for r in self._transport.exchange(own.pack(), tag)]
            self.agreement.compare_launches(records)
        self.schedule.agree_used([record.used for record in records])
        if all(record.divisor == self.schedule.divisor for record in records):  # else `finalize_grads` agrees on one
            self._gather_means(are_early=all(record.gathered == record.divisor for record in records))

    def _gather_means(self, *, are_early: bool = False) -> None:
        """Give every rank the means. Ranks have agreed on the divisor, and which gradients exist. ``are_early``: those
        that were gathered in the round are right."""
        summed = [bucket.grad for bucket in self._buckets if bucket.grad.has_sum]
        if are_early:
            summed = [grad for grad in summed if grad not in self.schedule.early]
        with behind_a_meeting(self._transport):
            Chain(
                grad.gather_means(self._collective, self.schedule.number, self.schedule.divisor) for grad in summed
            ).wait()
        self.schedule.means_gathered()

    def _empty_round(self, also: Sequence[int] = ()) -> None:
        """Take part in a round of the other ranks: contribute what is pending here, and -0.0 otherwise."""
        with self._catching_up():
            self.schedule.begin(is_round=True, shows_means=self.means_are_shown, also=also)
            self._complete()
            self.publisher.publish()

    def finish_interrupted(self) -> None:
        """Complete the round of a backward that an exception left, so that collectives stay matched."""
        if not self.hooks.interrupted:
            return
        self.take_left()
        cleared = self.publisher.cleared()  # after the exception, and so after the round that is completed here
        self.hooks.forget()
        if self._transport.broken:
            self.schedule.abandon()
            return
        self._complete()
        self.publisher.forget(cleared)
        self.publisher.publish()

    # -- agreement ----------------------------------------------------------------------------------------------------

    def finalize_grads(
        self,
        purpose: str,
        problem: str | None = None,
        *,
        scale: float | None = None,
        options: Mapping[str, int] | None = None,
        attach: Callable[[bool], bytes] | None = None,
    ) -> list[bytes]:
        """Turn the sums into means, once. Collective; ``purpose``: the call that errors name.

        ``problem``: an error that this rank alone may have found; every rank raises it, and nothing has changed.
        ``scale``: the loss scale of the gradients, if they are about to be unscaled; ``options``: of `Record`.
        Returns every rank's ``attach(are_means)``, which may be made of the gradients if they are means already; none
        if these are others now, because ranks have used different parameters.
        """
        self.check_synchronised(purpose)
        records = self.check_consistency(purpose, problem, scale=scale, options=options, attach=attach)
        others_were_used = not self.schedule.is_open and len({record.used for record in records}) > 1
        self.finalize_agreed(purpose, records)
        return [] if others_were_used else [record.attachment for record in records]

    def check_synchronised(self, purpose: str) -> None:
        """Raise `RuntimeError` inside `no_sync`. Local."""
        if not self._sync:
            raise RuntimeError(
                f"{purpose} inside no_sync(): call it after the block; gradients that are pending are reduced then"
            )

    def finalize_agreed(self, purpose: str, records: Sequence[Record]) -> None:
        """Turn the sums into means, once, after `check_consistency` has returned these records. Collective."""
        used = [record.used for record in records]
        if not self.schedule.is_open:
            self.schedule.agree_used(used)
            self.publisher.publish()  # a mean that the user has replaced: what follows changes ours, not his
            return
        pending = sorted({bucket for record in records for bucket in record.pending})
        if pending:
            with behind_a_meeting(self._transport):
                self._empty_round(pending)
        self.schedule.agree_used(used)
        if self._stage.grads_replicated:
            if self.schedule.means_divisor != self.schedule.divisor:
                self._gather_means()
        else:
            sums = [bucket.grad.final_grad() for bucket in self._buckets]
            self._division.divide([each.data for each in sums if each is not None], self.schedule.divisor)
        self.schedule.finalized(purpose)
        self.publisher.publish()

    def check_consistency(
        self,
        purpose: str,
        problem: str | None = None,
        *,
        scale: float | None = None,
        options: Mapping[str, int] | None = None,
        attach: Callable[[bool], bytes] | None = None,
        message: bytes = b"",
    ) -> list[Record]:
        """Wait for all ranks, with catch-up, and compare their records. Collective; raises the same error on every
        rank. ``message``: is attached to this rank's record, instead of what ``attach`` returns."""
        if self.hooks.inside_backward:
            raise inside_backward(purpose)
        self._streams.wait_for_previous()
        self.finish_interrupted()
        assigned = self.publisher.detect_changes()
        if (
            self.schedule.is_open and self.schedule.means_divisor != self.schedule.divisor
        ):  # the means will be gathered anew
            problem = problem or self.publisher.edited()
        problem = problem or assigned

        def record() -> Record:
            attachment = message if attach is None else attach(not self.schedule.is_open)
            return replace(
                self._record(), error=problem, scale=scale, options=dict(options or {}), attachment=attachment
            )

        with self._agreeing():
            return self.agreement.agree(purpose, self.schedule.number, self._empty_round, record, self._name)

    def _record(self) -> Record:
        known = self.schedule
        launches = self._transport.launches
        launched = None if launches is None else launches.ledger.state
        phase, used, trainable = known.phase.name.lower(), known.used(), known.trainable()
        return Record(known.divisor, phase, known.pending, used, trainable, launched=launched)

    def _name(self, number: int) -> str:
        """Return the name of a parameter by its number among the flags of a record."""
        return repr([spec.name for bucket in self._buckets for spec in bucket.specs][number])

    # -- for the optimizer --------------------------------------------------------------------------------------------

    def join(self, groups: Sequence[Options], *, gathers_are_broadcast: bool) -> JoinProtocol:
        """Broadcast calls from now on, until `end_join`. ``gathers_are_broadcast``: also the gathers of units."""
        if self._joining.active:
            raise RuntimeError("join() inside join(): leave the outer block first")

        def meet(purpose: str, data: bytes) -> list[bytes]:
            if not self.hooks.inside_backward:
                self.finish_interrupted()
                self.publisher.detect_changes()
            return self.agreement.meet(purpose, self.schedule.number, self._empty_round, lambda: data)

        self.finish_interrupted()
        self.publisher.detect_changes()
        protocol = JoinProtocol(self._transport, meet, groups)
        self._joining.begin(
            lambda name, arguments: protocol.broadcast(name, arguments, self.schedule.divisor),
            gathers_are_broadcast=gathers_are_broadcast,
        )
        self.publisher.withdraw()
        return protocol

    def end_join(self) -> None:
        """End `join`: calls are not broadcast any more."""
        self._joining.end()
        self.publisher.publish()

    def unscale(self, found: Tensor, inverse: Tensor) -> None:
        """Take the loss scale out of the means, and set ``found`` to 1 on every rank if any is not finite. Collective.

        A `GradScaler` calls this once for each dtype and device of gradients; the first call does the work of all.
        """
        if self._found.repeats(found, may_be_new=self.schedule.is_open):
            return
        factor = inverse.item()  # host synchronisation: ranks compare it, once a step
        with self._unscaling(), self._joining.broadcast("unscale", inverse=factor):
            self.finalize_grads("GradScaler.unscale_()", scale=1 / factor if factor else math.inf)
            mine = bytes([self.means.unscale(inverse)])
            tag = Tag(Kind.EXCHANGE, "gradients that are not finite", self.schedule.number, self.agreement.number)
            self._found.note(found, any(flag[0] for flag in self._transport.exchange(mine, tag)))

    def note_elsewhere(self, *, is_finite: bool) -> None:
        """Note whether all gradients of the whole model, of which this is a part, are finite. Local."""
        if not is_finite:
            self._found.note_elsewhere()

    @property
    def has_new_gradients(self) -> bool:
        """True if this rank has gradients that no step has used, and that were not cleared."""
        if not self.hooks.interrupted:
            self.publisher.detect_changes()
        return self.schedule.has_new_gradients

    def set_divisor(self, value: float) -> None:
        """Set the divisor of the next `finalize_grads`."""
        if not self.hooks.interrupted:
            self.take_left()  # means may be published, in a hook
            self.publisher.detect_changes()
        self.schedule.set_divisor(value)
        if self.means_are_shown and self.schedule.is_open:
            self.publisher.publish()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear every gradient, or set those that exist to zero."""
        if self.hooks.inside_backward:
            raise inside_backward("zero_grad()")
        self.finish_interrupted()
        self.publisher.zero_grad(set_to_none)

    @untraced_context
    def no_sync(self) -> Iterator[None]:
        """Make backwards inside the block add to this rank's own contribution; they are not rounds."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def close(self) -> None:
        """Remove the hooks; gradients that this rank holds whole become the user's own."""
        self.hooks.remove()
        self.publisher.hand_over()
        self.schedule.close()
