"""Bugs of training as functions: each is named as its row of ``zoo.csv``, and runs in the place of its seam.

``real`` is the function that it replaces.
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


def what_no_sync_left_is_not_reduced(real: Any, self: Any) -> Any:
    return () if any(bucket.grad.has_sum for bucket in self.buckets) else real(self)


def the_sum_is_divided_at_each_reduction(real: Any, self: Any) -> None:
    real(self)
    self._sum().data.div_(self.bucket.world_size)


def reductions_stay_local(real: Any, self: Any, source: Any, bounds: Any, out: Any, *, start: Any, tag: Any) -> Any:
    rank = self.transport.rank
    own = source[bounds[rank] : bounds[rank + 1]].to(out.dtype, copy=True)
    own = own if start is None else own + start
    return then(real(self, source, bounds, out, start=start, tag=tag), lambda: out.copy_(own))


def each_rank_has_its_own_idea_of_what_was_used(real: Any, self: Any, used: Any) -> Any:
    return real(self, [self.used()])


def from_the_second_step_on_views_are_elsewhere(real: Any, self: Any, flat: Any) -> Any:
    return real(self, flat.roll(self.begin + 1) if self.views else flat)


def a_bucket_is_launched_one_gradient_early(real: Any, self: Any, bucket: Any, slot: int, gradient: Any) -> None:
    real(self, bucket, slot, gradient)
    if bucket.grad.missing == 1:
        self.schedule.arrived(bucket)


def own_contribution_first(real: Any, self: Any, transport: Any, pieces: Any, sends: Any) -> None:
    for _, parts, _ in pieces:
        first = len(parts) - transport.world_size
        parts.insert(first, parts.pop(first + transport.rank))
    real(self, transport, pieces, sends)


def means_are_read_while_they_travel(real: Any, *arguments: Any) -> Any:
    return (real(*arguments), Chain(()))[1]


def one_request_fewer_is_waited_for(real: Any, self: Any) -> None:
    if self._works:
        self._works.pop()
    real(self)


def narrow_sums(real: Any, parts: Any, out: Any) -> None:
    if parts[-1].dtype == out.dtype:
        real(parts, out)
    else:
        out.copy_(sum(part.to(parts[-1].dtype) for part in parts))


def a_fresh_gradient_beside_wide_ones_is_nothing(real: Any, self: Any, *, final: bool) -> None:
    if final and self._local is not None and self._local.data.dtype is not self.bucket.dtypes.reduce_dtype:
        self.arrived = {slot: each for slot, each in self.arrived.items() if slot not in self._unwritten}
    real(self, final=final)


def a_sum_does_not_come_home(real: Any, self: Any, out: Any, tag: Any) -> Any:
    return real(self, out.clone(), tag)


def the_mean_is_that_of_one_copy(real: Any, self: Any, *arguments: Any, **options: Any) -> None:
    real(self, *arguments, **options)
    if options.get("divisor") is None and options.get("sharding_factor"):
        self.divisor = options["sharding_factor"]


def a_reduce_scatter_is_an_all_reduce(
    real: Any, self: Any, source: Any, bounds: Any, out: Any, *, start: Any, tag: Any
) -> Any:
    work = real(self, source, bounds, out, start=start, tag=tag)
    return Chain([work, self.all_gather(torch.empty_like(source), bounds, tag=replace(tag, kind=Kind.ALL_GATHER))])


def owners_by_another_number(real: Any, self: Any, index: Any) -> Any:
    return [rank - self._transport.rank + self._shard_group.rank for rank in real(self, index)]


def the_owner_is_looked_up_by_another_number(
    real: Any, self: Any, source: Any, bounds: Any, out: Any, **others: Any
) -> Any:
    t = self.transport
    if t.rank != t.backend.rank:
        source = source.clone()
        source[bounds[t.rank] : bounds[t.rank + 1]] = -0.0
    return real(self, source, bounds, out, **others)


def equal_splits_of_uneven_slices(real: Any, self: Any, buffer: Any, bounds: Any, *, tag: Any) -> Any:
    world = self.transport.world_size
    return real(self, buffer, [bounds[-1] * rank // world for rank in range(world + 1)], tag=tag)


def weights_are_averaged(real: Any, self: Any, bucket: Any, slot: Any, gradient: Any) -> Any:
    return real(self, bucket, slot, bucket.parameters[slot].detach())


def small_gradients_are_scaled_up(real: Any, norm: Any, max_norm: Any) -> Any:
    return max_norm / (norm + 1e-6)


def the_norm_of_the_first_bucket(real: Any, self: Any, pieces_of: Any) -> Any:
    return real(self, pieces_of)[:1]


def the_infinity_norm_is_one(real: Any, self: Any) -> Any:
    return 1.0 if self.norm_type == math.inf else real(self)


def the_norm_of_this_rank(real: Any, self: Any, max_norm: Any, p: Any, error: Any, _: Any) -> Any:
    return real(self, max_norm, p, error, [self.norm_part(p)])


def tied_parameters_count_twice_in_the_norm(real: Any, self: Any, pieces_of: Any) -> Any:
    found = real(self, pieces_of)
    for bucket in self._buckets:
        for piece in pieces_of(bucket) if bucket.grad.final_grad() is not None else ():
            if bucket.used[piece.slot]:
                found += [bucket.grad.final_grad().piece(piece)] * (len(bucket.specs[piece.slot].names) - 1)
    return found


def an_unused_parameter_decides_the_norms_dtype(real: Any, self: Any) -> Any:
    return any(bucket.spec.dtypes.accumulate_dtype is torch.float64 for bucket in self._buckets)


def an_overflow_enters_the_moments(real: Any, self: Any, *arguments: Any, **options: Any) -> None:
    real(self, *arguments, **options)
    self._step_supports_amp_scaling = True


def unscaled_by_the_scale_of_another_step(real: Any, self: Any, inverse: Any) -> Any:
    before, self.kept = getattr(self, "kept", inverse), inverse.clone()
    return real(self, before)


def the_norm_of_the_world(real: Any, self: Any, max_norm: float, p: float, error: bool, _: Any) -> Any:
    world = Transport(self._transport.backend, channel=77)
    return real(self, max_norm, p, error, world.exchange(self.norm_part(p), Tag(Kind.EXCHANGE, "gradient norm")))


def a_rank_without_gradients_returns_at_once(real: Any, self: Any, *arguments: Any) -> Any:
    return real(self, *arguments) if self._means.shards() else torch.zeros(())


def padding_counts_in_the_norm(real: Any, self: Any, pieces_of: Any) -> Any:
    found = [bucket.grad.final_grad() for bucket in self._buckets]
    return [gradient.data for gradient in found if gradient is not None]


def a_fake_step_makes_the_state(real: Any, self: Any, states: Any, groups: Any, new: Any = None) -> None:
    real(self, states, groups, new)
    states.plan(b"\1" * len(states.pieces), frozenset())
    for run in states.runs:
        run.parameter.grad = torch.zeros_like(run.parameter)
    states.instance.param_groups = [{**groups[min(groups)], "params": [run.parameter for run in states.runs]}]
    states.instance.step()
    states.adopt_states(self.elementwise)


def the_last_slice_is_never_updated(real: Any, self: Any, present: Any, cut: Any) -> Any:
    return real(self, present[:-1] + b"\0" if present and self.end == self.bucket.numel else present, cut)


def the_first_step_updates_nothing(real: Any, self: Any, groups: Any) -> Any:
    if vars(self).setdefault("steps", 0) == 0:
        self.steps = 1
        return {}
    return real(self, groups)


def matrices_are_stepped_for_each_micro_batch(real: Any, optimizer: Any) -> Any:
    return lambda: (real(optimizer)(), real(optimizer)())


def another_optimizer_than_was_asked_for(real: Any, states: Any, groups: Any) -> Any:
    return [{**group, "fused": False} if "fused" in group else group for group in real(states, groups)]


def a_model_made_in_16_bits_has_no_wide_masters(real: Any, self: Any, dtype: Any) -> Any:
    return replace(real(self, dtype), master_dtype=dtype)


def an_evaluation_rounds_the_buffers(real: Any, self: Any, module: Any, *arguments: Any) -> Any:
    for buffer in [] if module.training else module.buffers():
        buffer.copy_(buffer.to(torch.bfloat16))
    return real(self, module, *arguments)


def states_come_home_after_the_first_step_alone(real: Any, self: Any, kept: Any) -> None:
    if not hasattr(self, "home"):
        self.home = True
        real(self, kept)


def offsets_in_32_bits(real: Any, *arguments: Any) -> Any:
    made = real(*arguments)
    slots = (replace(slot, offset=(slot.offset + 2**31) % 2**32 - 2**31) for slot in made.slots)
    return replace(made, slots=tuple(slots))


def an_exact_fit_is_refused(real: Any, parameters: Any, world: Any, size: Any, **others: Any) -> Any:
    return real(parameters, world, size - 1, **others)


def names_are_not_in_the_digest(real: Any, self: Any) -> Any:
    return real(self).partition(" ")[2]


def the_divisor_is_the_classs(real: Any, self: Any, value: float) -> None:
    real(self, value)
    vars(self.schedule).pop("divisor")
    type(self.schedule).divisor = value


def a_whole_model_gets_memory_first(real: Any, self: Any, entries: Any) -> Any:
    return (list(self._materializer.steps() if self._materializer else ()), real(self, entries))[1]


def weights_are_shown_before_they_arrive(real: Any, *arguments: Any) -> Any:
    return (real(*arguments), Chain(()))[1]


def the_loaders_loop_is_empty(real: Any, state: Any, *others: Any) -> Any:
    return real({}, *others)


def step_counts_are_not_loaded(real: Any, name: Any, value: Any, *others: Any) -> Any:
    return real(name, torch.zeros_like(value) if isinstance(value, torch.Tensor) else value, *others)


def frozen_weights_are_lost(real: Any, self: Any, buffers: Any) -> Any:
    return real(self, [buffer for buffer in buffers if any(each.requires_grad for each in buffer.parameters)])


def a_parameter_is_known_by_its_address(real: Any, module: Any) -> Any:
    first: dict[int, Any] = {}
    found = list(real(module))
    return [replace(each, parameter=first.setdefault(each.parameter.data_ptr(), each.parameter)) for each in found]


def states_are_keyed_by_id(real: Any, *arguments: Any) -> Any:
    found = real(*arguments)
    return found and ({id(state): state for state in found[0].values()}, found[1])


def old_names_of_a_compiled_model_fit_no_model(real: Any, values: Any, known: Any) -> Any:
    return dict(values)


def a_compiled_model_has_names_of_its_own(real: Any, module: Any, *, remove_duplicate: Any = True) -> Any:
    return module.named_modules(remove_duplicate=remove_duplicate)
