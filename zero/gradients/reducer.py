"""From the gradients of a rank's backwards to mean gradients at their owners.

`finalize_grads` agrees on all that no single bucket shows: how many rounds each rank entered (a rank behind catches
up), which parameters were used, which buckets are pending, the divisor, and errors that one rank alone found.

Takes gradients out of p.grad, where autograd has put them, and leaves placeholders there.

A hook leaves the gradient there until the last one of its bucket has come, or the backward ends: then all are taken in
one loop. Until then p.grad is the user's, as in a plain loop: an edit by a hook is an edit of the gradient, and None is
none. A gradient that autograd adds to a placeholder is taken in its hook, since the next one would replace it.

The division of sums, with the bits of torch's `div_`, in one call for all buckets where there is one.

On the CPU each sum is divided by itself. On accelerators the number of kernels decides, and torch has calls for lists
of tensors. Their kernels are others than that of `div_`: on CUDA `div_` multiplies by the reciprocal of a number, and
`_foreach_div_` divides. So a way is chosen by a trial for each device and dtype, before any step.

The mean gradients that a rank steps with, as pieces of those parameters that some rank used.

Knows: when a round is due. A backward outside `no_sync` is one; contributions that `no_sync` left pending are reduced
in a further round when they are needed. Does not know: how the optimizer uses a gradient, how bytes are sent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from ctypes import c_float

import torch
from torch import Tensor

from collectives import Chain, Collective, Kind, MismatchError, Tag, Transport, behind_a_meeting
from collectives.torch_internals import amp_unscale_, foreach_div_, foreach_mul_

from ..core.bits import INTEGERS, digest_of_part, host_readable, read_scalars, same_bits
from ..core.layout import Pieces
from ..core.parameter_specs import as_plain, changed
from ..core.stage import Placement, Stage
from ..runtime.backward_tracker import BackwardTracker
from ..runtime.bucket import Bucket, MakePlaceholder
from ..runtime.compiled_calls import untraced_context
from ..runtime.flat_buffer import FlatBuffer
from ..runtime.joining import Joining, UnitOrder
from ..runtime.offload import wait_for_host
from ..runtime.profiler_ranges import ProfilerRange
from ..runtime.streams import Streams
from .agreement import Agreement, JoinProtocol, Options, Record, check_usable
from .backward_schedule import BackwardSchedule, inside_backward
from .grad_publisher import GradPublisher, SlotRef
from .hooks import GradientHooks

_STRIDED = torch.strided


class GradientTaking:
    """Takes the gradients of one optimizer on one rank. ``rank``: as errors name it."""

    def __init__(self, rank: int, make_placeholder: MakePlaceholder) -> None:
        self._rank, self._make_placeholder = rank, make_placeholder

    def take(self, bucket: Bucket, slot: int, gradient: Tensor) -> None:
        """Give a bucket the gradient of a slot, and put a placeholder into p.grad.

        Raises `RuntimeError`, and leaves None there, if the gradient is sparse, or if torch refuses the placeholder.
        """
        try:
            if gradient.layout is _STRIDED:
                bucket.take_gradient(slot, gradient, self._make_placeholder)
                return
        except RuntimeError as refused:
            bucket.publish(slot, None)
            problem = changed(bucket.parameters[slot], bucket.specs[slot])
            raise RuntimeError(
                f"rank {self._rank}: {problem or f'the gradient of {bucket.specs[slot].name!r}: {refused}'}"
            ) from refused
        bucket.parameters[slot].grad = None
        raise RuntimeError(
            f"rank {self._rank}: the gradient of {bucket.specs[slot].name!r} is {gradient.layout}: "
            "sparse gradients are not supported; build the Embedding with sparse=False"
        )

    def take_left(self, bucket: Bucket) -> list[int]:
        """Take the gradients that hooks have left in p.grad. Return the slots where the user has put None since: they
        have none."""
        cleared = list[int]()
        with as_plain():  # a released parameter would be asked in Python
            while bucket.left:  # an error drops the gradient that caused it, and no other
                slot = bucket.left.pop()
                gradient = bucket.parameters[slot].grad
                if gradient is None:
                    bucket.clear_slot(slot)
                    cleared.append(slot)
                else:
                    self.take(bucket, slot, gradient.detach() if gradient.requires_grad else gradient)
        return cleared


_Way = Callable[[list[Tensor], float], None]
# No reciprocal is exact, and fp32 does not have the last three. With 8/7 some quotient in 16 bits is not the product.
_DIVISORS = (3.0, 7.0, 8 / 7, 0.1, 16777217.0)


class Division:
    """The way in which one optimizer divides sums on each device."""

    def __init__(self) -> None:
        self._ways: dict[tuple[torch.device, torch.dtype], _Way] = {}

    def prepare(self, device: torch.device, dtype: torch.dtype, *, offloaded: bool = False) -> None:
        """Choose the way for sums of a floating dtype on a device. Local; waits for the device, once.

        ``offloaded``: they lie in the host's memory, and get the quotients of the device.
        """
        if (device, dtype) not in self._ways:
            self._ways[device, dtype] = _one_by_one if host_readable(device) else _chosen(device, dtype)
        if offloaded:
            self._ways[torch.device("cpu"), dtype] = self._ways[device, dtype]

    @torch.no_grad()
    def divide(self, sums: Sequence[Tensor], divisor: float) -> None:
        """Divide 1-D tensors in place, with the bits of ``div_(divisor)``. Each is of a device and dtype of
        `prepare`."""
        if divisor == 1:
            return
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for each in sums:
            alike.setdefault((each.device, each.dtype), []).append(each)
        for key, tensors in alike.items():
            self._ways[key](tensors, divisor)


def _one_by_one(tensors: list[Tensor], divisor: float) -> None:
    for tensor in tensors:
        tensor.div_(divisor)


def _by_reciprocal(tensors: list[Tensor], divisor: float) -> None:
    foreach_mul_(tensors, _reciprocal(divisor, tensors[0].dtype))


def _reciprocal(divisor: float, dtype: torch.dtype) -> float:
    """Return 1 / ``divisor`` as a kernel of CUDA forms it: in fp64 for fp64, and else in fp32.

    The quotient of two fp32 numbers that is rounded to fp64 and then to fp32 is the one that is rounded once.
    """
    if dtype is not torch.float64:
        divisor = c_float(divisor).value
    inverse = 1.0 / divisor if divisor else math.inf
    return inverse if dtype is torch.float64 else c_float(inverse).value


def _chosen(device: torch.device, dtype: torch.dtype) -> _Way:
    """Return the way of fewest launches that has the bits of `div_` on this device."""
    numbers = _tried(dtype).to(device)
    odd = numbers.numel() // 2 + 1

    def quotients(way: _Way) -> Tensor:
        found = []
        for divisor in _DIVISORS:
            found.append(numbers.clone())
            way([found[-1][:odd], found[-1][odd:]], divisor)  # the second is aligned otherwise
        return torch.cat(found)

    expected = quotients(_one_by_one)
    ways: tuple[_Way, ...] = (_by_reciprocal, foreach_div_)
    for way in ways:
        if same_bits(quotients(way), expected):  # host synchronisation: a trial before any step
            return way
    return _one_by_one


def _tried(dtype: torch.dtype) -> Tensor:
    """Return all numbers of 16 bits, or so many of random bits, among them NaNs, infinities and subnormal numbers."""
    integers = INTEGERS[dtype.itemsize]
    low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
    if dtype.itemsize == 2:
        return torch.arange(low, high + 1, dtype=torch.int32, device="cpu").to(integers).view(dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (1 << 16,), dtype=integers, generator=generator, device="cpu").view(dtype)


class ReducedGrads:
    """The mean gradients of one optimizer on one rank, after the ranks have finalized them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """``buckets``: the list itself, which may grow."""
        self._buckets = buckets

    def shards(self) -> list[Tensor]:
        """Return the means in the shards that this rank owns, 1-D: over all owners, every element once."""
        return self._intervals(lambda bucket: bucket.grad.pieces)

    def shards_of(self, positions: Set[int], *, inside: bool) -> list[Tensor]:
        """Return those of `shards` that are of the parameters at these positions in the layout, or of all others."""

        def chosen(bucket: Bucket) -> Pieces:
            slots = bucket.spec.slots
            return Pieces(p for p in bucket.grad.pieces if (slots[p.slot].parameter in positions) == inside)

        return self._intervals(chosen)

    def digests(self, positions: Iterable[int]) -> dict[int, int | None]:
        """Return the `digest_of_part` of this rank's shard of the mean of each of these parameters; None if no rank
        used it."""
        found: dict[int, int | None] = dict.fromkeys(positions)
        for bucket in self._buckets:
            gradient = bucket.grad.final_grad()
            for slot, place in enumerate(bucket.spec.slots):
                if place.parameter in found and bucket.used[slot] and gradient is not None:
                    mine = [piece for piece in bucket.grad.pieces if piece.slot == slot]
                    parts = [digest_of_part(gradient.piece(piece), bucket.spec.within(piece).start) for piece in mine]
                    found[place.parameter] = sum(parts)
        return found

    def held(self, *, keeps_minus_zero: bool = False) -> list[Tensor]:
        """Return the means that this rank steps with, 1-D, in few tensors, to be multiplied or divided in place.

        The places of parameters without a gradient are left out, unless the change ``keeps_minus_zero``: they hold
        -0.0, and later gradients are added to it.
        """
        found = []
        for bucket in self._buckets:
            gradient = bucket.grad.final_grad()
            if gradient is not None:
                alone = 0 in bucket.used and not keeps_minus_zero
                found += _used(bucket, gradient, bucket.states.pieces) if alone else [gradient.data]
        return found

    def unscale(self, inverse: Tensor) -> bool:
        """Multiply the means that this rank steps with by ``inverse``, a tensor of one element.

        Returns whether any element was not finite. The result is this rank's alone.
        """
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for interval in self._intervals(lambda bucket: bucket.states.pieces):
            alike.setdefault((interval.dtype, interval.device), []).append(interval)
        found: dict[torch.device, Tensor] = {}
        for (_, device), intervals in alike.items():
            flag = found.setdefault(device, torch.zeros(1, device=device))
            amp_unscale_(intervals, flag, inverse.to(device))
        # host synchronisation: every rank must take or skip the same step
        return any(read_scalars([flag[0] for flag in found.values()]))

    def _intervals(self, pieces_of: Callable[[Bucket], Pieces]) -> list[Tensor]:
        """Return the gradients of the pieces that some rank used. Pieces with no padding between them are one."""
        found = []
        for bucket in self._buckets:
            gradient = bucket.grad.final_grad()
            if gradient is not None:
                found += _used(bucket, gradient, pieces_of(bucket))
        return found


class FoundInf:
    """The tensors in which a `GradScaler` learns that a gradient is not finite: in one `unscale_`, one for each device.

    It hands over the gradients by device and dtype; that of a further device belongs to the same `unscale_`.
    """

    def __init__(self) -> None:
        self._results: dict[torch.device, Tensor] = {}  # in the last `unscale_`
        self._overflow = False
        self.overflow_elsewhere = False  # in another part of the model, of the gradients that there are now

    def repeats(self, found: Tensor, *, may_be_new: bool) -> bool:
        """Return whether this `unscale_` has unscaled the gradients already. If so, ``found``, one element, is set to
        the earlier result.

        ``may_be_new``: the gradients may be others than those of the last `unscale_`.
        """
        if self._results and not may_be_new and found.device not in self._results:
            self._set(found)
        return self._results.get(found.device) is found

    def note_elsewhere(self) -> None:
        """Note that a gradient of another part of the model is not finite: the step of this `unscale_` is skipped."""
        self.overflow_elsewhere = True
        for found in self._results.values():
            found.fill_(1.0)

    def asked_for_step(self) -> None:
        """Let the `GradScaler` that calls skip its step if a gradient of another part of the model is not finite. It
        has unscaled means in p.grad by itself, and it alone knows the tensors of the result."""
        frame = sys._getframe() if self.overflow_elsewhere else None
        while frame is not None:
            if frame.f_code is torch.amp.GradScaler.step.__code__:
                scaler, optimizer = frame.f_locals["self"], frame.f_locals["optimizer"]
                for found in scaler._found_inf_per_device(optimizer).values():
                    found.fill_(1.0)
            frame = frame.f_back

    def note(self, found: Tensor, overflow: bool) -> None:
        """Note the result of an `unscale_`, and set ``found`` of its first device to it."""
        self._results, self._overflow = {}, overflow
        self._set(found)

    def _set(self, found: Tensor) -> None:
        self._results[found.device] = found
        if self._overflow:
            found.fill_(1.0)


def _used(bucket: Bucket, gradient: FlatBuffer, pieces: Pieces) -> list[Tensor]:
    """Return the gradients of those of the pieces that some rank used. Pieces with no padding between them are one."""
    used = pieces if 0 not in bucket.used else Pieces(piece for piece in pieces if bucket.used[piece.slot])
    return [gradient.interval(begin, end) for begin, end in used.joined]


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
        if not self.schedule.is_open:
            self.schedule.begin_dropping()
            return
        if self._assigned is not None:
            problem = f"rank {self._transport.rank}: {self._assigned}"
            self.publisher.publish()
            if self._transport.world_size > 1:
                self._transport.abort(problem)  # the others cannot be asked whether they found one
            raise RuntimeError(problem)
        edited, self._found.overflow_elsewhere = self.publisher.edited(), False
        self.schedule.begin(is_round=self._sync, shows_means=self.means_are_shown)
        if edited is not None:
            self.schedule.refuse_use(edited)

    def gradient_ready(self, bucket: Bucket, slot: int, gradient: Tensor) -> None:
        if self.schedule.drops:
            bucket.drop_gradient(slot, self.publisher.make_placeholder)
            return
        if self._streams.exist and self._streams.changed():
            self._streams.wait_for_previous()
        if bucket.left:
            self._taking.take_left(bucket)
        self._taking.take(bucket, slot, gradient)
        bucket.grad.missing -= 1
        if not bucket.grad.missing:
            self.schedule.arrived(bucket)

    def take_left(self) -> list[SlotRef]:
        left = [bucket for bucket in self._buckets if bucket.left]
        return [(bucket, slot) for bucket in left for slot in self._taking.take_left(bucket)]

    def backward_ended(self) -> None:
        self._streams.wait_for_previous()
        self._complete()
        self._shard_group.pool.drop_cheap()
        self.publisher.publish()

    def gradient_zeroed(self, bucket: Bucket, slot: int) -> None:
        self.schedule.forget_means()
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
            own = self._record()._replace(gathered=self.schedule.early.divisor)
            records = Record.unpack_all(self._transport.exchange(own.pack(), tag))
            self.agreement.compare_launches(records)
        self.schedule.agree_used([record.used for record in records])
        for record in records:
            if record.unusable is not None:
                self.schedule.refuse_use(record.unusable)
                return
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
        # after the exception, and so after the round that is completed here, which brings what others have contributed
        cleared = [*self.take_left(), *self.publisher.cleared()]
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
        check_usable(purpose, records)
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
            keeps_minus_zero = self.schedule.divisor >= torch.finfo(torch.float32).tiny
            self._division.divide(self.means.held(keeps_minus_zero=keeps_minus_zero), self.schedule.divisor)
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
            return self._record()._replace(error=problem, scale=scale, options=options or {}, attachment=attachment)

        with self._agreeing():
            return self.agreement.agree(purpose, self.schedule.number, self._empty_round, record, self._name)

    def _record(self) -> Record:
        known = self.schedule
        launches = self._transport.launches
        launched = None if launches is None else launches.ledger.state
        phase, used, trainable = known.phase.name.lower(), known.used(), known.trainable()
        return Record(known.divisor, phase, known.pending, used, trainable, launched=launched, unusable=known.unusable)

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

    def asked_for_step(self) -> None:
        """Note that a `GradScaler` is about to decide whether to step. Local."""
        self._found.asked_for_step()

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
