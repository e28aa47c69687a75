"""Bugs of training as functions: each is named as its row of ``zoo.csv``, and takes the real function of its seam.

It returns the wrong one, which takes the real one's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from collectives import Chain, Kind, Tag
from collectives.transport import Transport


def then(work: Any, call: Callable[[], object]) -> Any:
    """Return work that calls ``call`` after a wait."""
    return SimpleNamespace(wait=lambda: (work.wait(), call()))


def what_no_sync_left_is_not_reduced(real: Any) -> Any:
    return lambda self: () if any(bucket.grad.has_sum for bucket in self.buckets) else real(self)


def the_sum_is_divided_at_each_reduction(real: Any) -> Any:
    def wrong(self: Any) -> None:
        real(self)
        self._sum().data.div_(self.bucket.world_size)

    return wrong


def reductions_stay_local(real: Any) -> Any:
    def wrong(self: Any, source: Any, bounds: Any, out: Any, *, start: Any, tag: Any) -> Any:
        rank = self.transport.rank
        own = source[bounds[rank] : bounds[rank + 1]].to(out.dtype, copy=True)
        own = own if start is None else own + start
        return then(real(self, source, bounds, out, start=start, tag=tag), lambda: out.copy_(own))

    return wrong


def each_rank_has_its_own_idea_of_what_was_used(real: Any) -> Any:
    return lambda self, used: real(self, [self.used()])


def from_the_second_step_on_views_are_elsewhere(real: Any) -> Any:
    return lambda self, flat: real(self, flat.roll(self.begin + 1) if self.views else flat)


def a_bucket_is_launched_one_gradient_early(real: Any) -> Any:
    def wrong(self: Any, bucket: Any, slot: int, gradient: Any) -> None:
        real(self, bucket, slot, gradient)
        if bucket.grad.missing == 1:
            self.schedule.arrived(bucket)

    return wrong


def own_contribution_first(real: Any) -> Any:
    def wrong(self: Any, transport: Any, pieces: Any, sends: Any) -> None:
        for _, parts, _ in pieces:
            first = len(parts) - transport.world_size
            parts.insert(first, parts.pop(first + transport.rank))
        real(self, transport, pieces, sends)

    return wrong


def means_are_read_while_they_travel(real: Any) -> Any:
    return lambda *arguments: (real(*arguments), Chain(()))[1]


def one_request_fewer_is_waited_for(real: Any) -> Any:
    def wrong(self: Any) -> None:
        if self._works:
            self._works.pop()
        real(self)

    return wrong


def narrow_sums(real: Any) -> Any:
    def wrong(parts: Any, out: Any) -> None:
        if parts[-1].dtype == out.dtype:
            real(parts, out)
        else:
            out.copy_(sum(part.to(parts[-1].dtype) for part in parts))

    return wrong


def a_fresh_gradient_beside_wide_ones_is_nothing(real: Any) -> Any:
    def wrong(self: Any, *, final: bool) -> None:
        if final and self._local is not None and self._local.data.dtype is not self.bucket.dtypes.reduce_dtype:
            self.arrived = {slot: each for slot, each in self.arrived.items() if slot not in self._unwritten}
        real(self, final=final)

    return wrong


def a_sum_does_not_come_home(real: Any) -> Any:
    return lambda self, out, tag: real(self, out.clone(), tag)


def the_mean_is_that_of_one_copy(real: Any) -> Any:
    def wrong(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        if options.get("divisor") is None and options.get("sharding_factor"):
            self.divisor = options["sharding_factor"]

    return wrong


def a_reduce_scatter_is_an_all_reduce(real: Any) -> Any:
    def wrong(self: Any, source: Any, bounds: Any, out: Any, *, start: Any, tag: Any) -> Any:
        work = real(self, source, bounds, out, start=start, tag=tag)
        return Chain([work, self.all_gather(torch.empty_like(source), bounds, tag=replace(tag, kind=Kind.ALL_GATHER))])

    return wrong


def owners_by_another_number(real: Any) -> Any:
    return lambda self, index: [rank - self._transport.rank + self._shard_group.rank for rank in real(self, index)]


def the_owner_is_looked_up_by_another_number(real: Any) -> Any:
    def wrong(self: Any, source: Any, bounds: Any, out: Any, **others: Any) -> Any:
        t = self.transport
        if t.rank != t.backend.rank:
            source = source.clone()
            source[bounds[t.rank] : bounds[t.rank + 1]] = -0.0
        return real(self, source, bounds, out, **others)

    return wrong


def equal_splits_of_uneven_slices(real: Any) -> Any:
    def wrong(self: Any, buffer: Any, bounds: Any, *, tag: Any) -> Any:
        world = self.transport.world_size
        return real(self, buffer, [bounds[-1] * rank // world for rank in range(world + 1)], tag=tag)

    return wrong


def weights_are_averaged(real: Any) -> Any:
    return lambda self, bucket, slot, gradient: real(self, bucket, slot, bucket.parameters[slot].detach())


def small_gradients_are_scaled_up(real: Any) -> Any:
    return lambda norm, max_norm: max_norm / (norm + 1e-6)


def the_norm_of_the_first_bucket(real: Any) -> Any:
    return lambda self, pieces_of: real(self, pieces_of)[:1]


def the_infinity_norm_is_one(real: Any) -> Any:
    return lambda self: 1.0 if self.norm_type == math.inf else real(self)


def the_norm_of_this_rank(real: Any) -> Any:
    return lambda self, max_norm, p, error, _: real(self, max_norm, p, error, [self.norm_part(p)])


def tied_parameters_count_twice_in_the_norm(real: Any) -> Any:
    def wrong(self: Any, pieces_of: Any) -> Any:
        found = real(self, pieces_of)
        for bucket in self._buckets:
            for piece in pieces_of(bucket) if bucket.grad.final_grad() is not None else ():
                if bucket.used[piece.slot]:
                    found += [bucket.grad.final_grad().piece(piece)] * (len(bucket.specs[piece.slot].names) - 1)
        return found

    return wrong


def an_unused_parameter_decides_the_norms_dtype(real: Any) -> Any:
    return lambda self: any(bucket.spec.dtypes.accumulate_dtype is torch.float64 for bucket in self._buckets)


def an_overflow_enters_the_moments(real: Any) -> Any:
    def wrong(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        self._step_supports_amp_scaling = True

    return wrong


def unscaled_by_the_scale_of_another_step(real: Any) -> Any:
    def wrong(self: Any, inverse: Any) -> Any:
        before, self.kept = getattr(self, "kept", inverse), inverse.clone()
        return real(self, before)

    return wrong


def the_norm_of_the_world(real: Any) -> Any:
    def wrong(self: Any, max_norm: float, p: float, error: bool, _: Any) -> Any:
        world = Transport(self._transport.backend, channel=77)
        return real(self, max_norm, p, error, world.exchange(self.norm_part(p), Tag(Kind.EXCHANGE, "gradient norm")))

    return wrong


def a_rank_without_gradients_returns_at_once(real: Any) -> Any:
    return lambda self, *arguments: real(self, *arguments) if self._means.shards() else torch.zeros(())


def padding_counts_in_the_norm(real: Any) -> Any:
    def wrong(self: Any, pieces_of: Any) -> Any:
        found = [bucket.grad.final_grad() for bucket in self._buckets]
        return [gradient.data for gradient in found if gradient is not None]

    return wrong


def a_fake_step_makes_the_state(real: Any) -> Any:
    def wrong(self: Any, states: Any, groups: Any, new: Any = None) -> None:
        real(self, states, groups, new)
        states.plan(b"\1" * len(states.pieces), frozenset())
        for run in states.runs:
            run.parameter.grad = torch.zeros_like(run.parameter)
        states.instance.param_groups = [{**groups[min(groups)], "params": [run.parameter for run in states.runs]}]
        states.instance.step()
        states.adopt_states(self.elementwise)

    return wrong


def the_last_slice_is_never_updated(real: Any) -> Any:
    return lambda self, present, cut: real(
        self, present[:-1] + b"\0" if present and self.end == self.bucket.numel else present, cut
    )


def the_first_step_updates_nothing(real: Any) -> Any:
    def wrong(self: Any, groups: Any) -> Any:
        if vars(self).setdefault("steps", 0) == 0:
            self.steps = 1
            return {}
        return real(self, groups)

    return wrong


def matrices_are_stepped_for_each_micro_batch(real: Any) -> Any:
    return lambda optimizer: lambda: (real(optimizer)(), real(optimizer)())


def another_optimizer_than_was_asked_for(real: Any) -> Any:
    return lambda states, groups: [
        {**group, "fused": False} if "fused" in group else group for group in real(states, groups)
    ]


def a_model_made_in_16_bits_has_no_wide_masters(real: Any) -> Any:
    return lambda self, dtype: replace(real(self, dtype), master_dtype=dtype)


def an_evaluation_rounds_the_buffers(real: Any) -> Any:
    def wrong(self: Any, module: Any, *arguments: Any) -> Any:
        for buffer in [] if module.training else module.buffers():
            buffer.copy_(buffer.to(torch.bfloat16))
        return real(self, module, *arguments)

    return wrong


def states_come_home_after_the_first_step_alone(real: Any) -> Any:
    def wrong(self: Any, kept: Any) -> None:
        if not hasattr(self, "home"):
            self.home = True
            real(self, kept)

    return wrong


def offsets_in_32_bits(real: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        made = real(*arguments)
        slots = (replace(slot, offset=(slot.offset + 2**31) % 2**32 - 2**31) for slot in made.slots)
        return replace(made, slots=tuple(slots))

    return wrong


def an_exact_fit_is_refused(real: Any) -> Any:
    return lambda parameters, world, size, **others: real(parameters, world, size - 1, **others)


def names_are_not_in_the_digest(real: Any) -> Any:
    return lambda self: real(self).partition(" ")[2]


def the_divisor_is_the_classs(real: Any) -> Any:
    def wrong(self: Any, value: float) -> None:
        real(self, value)
        vars(self.schedule).pop("divisor")
        type(self.schedule).divisor = value

    return wrong


def a_whole_model_gets_memory_first(real: Any) -> Any:
    return lambda self, entries: (list(self._materializer.steps() if self._materializer else ()), real(self, entries))[
        1
    ]


def weights_are_shown_before_they_arrive(real: Any) -> Any:
    return lambda *arguments: (real(*arguments), Chain(()))[1]


def the_loaders_loop_is_empty(real: Any) -> Any:
    return lambda state, *others: real({}, *others)


def step_counts_are_not_loaded(real: Any) -> Any:
    return lambda name, value, *others: real(
        name, torch.zeros_like(value) if isinstance(value, torch.Tensor) else value, *others
    )


def frozen_weights_are_lost(real: Any) -> Any:
    return lambda self, buffers: real(
        self, [buffer for buffer in buffers if any(each.requires_grad for each in buffer.parameters)]
    )


def a_parameter_is_known_by_its_address(real: Any) -> Any:
    def wrong(module: Any) -> Any:
        first: dict[int, Any] = {}
        found = list(real(module))
        return [replace(each, parameter=first.setdefault(each.parameter.data_ptr(), each.parameter)) for each in found]

    return wrong


def states_are_keyed_by_id(real: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        found = real(*arguments)
        return found and ({id(state): state for state in found[0].values()}, found[1])

    return wrong


def old_names_of_a_compiled_model_fit_no_model(real: Any) -> Any:
    return lambda values, known: dict(values)


def a_compiled_model_has_names_of_its_own(real: Any) -> Any:
    return lambda module, *, remove_duplicate=True: module.named_modules(remove_duplicate=remove_duplicate)
