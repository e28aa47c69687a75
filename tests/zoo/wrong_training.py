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


def the_sum_is_divided_at_each_reduction(real: Any, self: Any, then: Any) -> None:
    real(self, lambda: self._sum().data.div_(self.bucket.world_size))
    then()


def reductions_stay_local(real: Any, self: Any, source: Any, bounds: Any, out: Any, *, start: Any, tag: Any) -> Any:
    rank = self.transport.rank
    own = source[bounds[rank] : bounds[rank + 1]].to(out.dtype, copy=True)
    own = own if start is None else own + start
    return then(real(self, source, bounds, out, start=start, tag=tag), lambda: out.copy_(own))


def a_bucket_is_launched_one_gradient_early(real: Any, self: Any, bucket: Any, slot: int, gradient: Any) -> None:
    real(self, bucket, slot, gradient)
    if bucket.grad.missing == 1:
        self.schedule.arrived(bucket)


def own_contribution_first(real: Any, self: Any, transport: Any, pieces: Any, sends: Any) -> None:
    for _, parts, _ in pieces:
        first = len(parts) - transport.world_size
        parts.insert(first, parts.pop(first + transport.rank))
    real(self, transport, pieces, sends)


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


def a_reduce_scatter_is_an_all_reduce(
    real: Any, self: Any, source: Any, bounds: Any, out: Any, *, start: Any, tag: Any
) -> Any:
    work = real(self, source, bounds, out, start=start, tag=tag)
    return Chain([work, self.all_gather(torch.empty_like(source), bounds, tag=replace(tag, kind=Kind.ALL_GATHER))])


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


def tied_parameters_count_twice_in_the_norm(real: Any, self: Any, pieces_of: Any) -> Any:
    found = real(self, pieces_of)
    for bucket in self._buckets:
        for piece in pieces_of(bucket) if bucket.grad.final_grad() is not None else ():
            if bucket.used[piece.slot]:
                found += [bucket.grad.final_grad().piece(piece)] * (len(bucket.specs[piece.slot].names) - 1)
    return found


def an_overflow_enters_the_moments(real: Any, self: Any, *arguments: Any, **options: Any) -> None:
    real(self, *arguments, **options)
    type(self)._step_supports_amp_scaling = True


def unscaled_by_the_scale_of_another_step(real: Any, self: Any, inverse: Any) -> Any:
    before, self.kept = getattr(self, "kept", inverse), inverse.clone()
    return real(self, before)


def the_norm_of_the_world(real: Any, self: Any, max_norm: float, p: float, error: bool, _: Any) -> Any:
    world = Transport(self._transport.backend, channel=77)
    return real(self, max_norm, p, error, world.exchange(self.norm_part(p), Tag(Kind.EXCHANGE, "gradient norm")))


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


def the_first_step_updates_nothing(real: Any, self: Any, groups: Any) -> Any:
    if vars(self).setdefault("steps", 0) == 0:
        self.steps = 1
        return {}
    return real(self, groups)


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


def the_divisor_is_the_classs(real: Any, self: Any, value: float) -> None:
    real(self, value)
    vars(self.schedule).pop("divisor")
    type(self.schedule).divisor = value


def a_parameter_is_known_by_its_address(real: Any, *arguments: Any) -> Any:
    first: dict[int, Any] = {}
    found = list(real(*arguments))
    return [replace(each, parameter=first.setdefault(each.parameter.data_ptr(), each.parameter)) for each in found]


def states_are_keyed_by_id(real: Any, *arguments: Any) -> Any:
    found = real(*arguments)
    return found and ({id(state): state for state in found[0].values()}, found[1])


def buffers_have_the_dtype_of_the_outermost(real: Any, self: Any) -> Any:
    return [(buffer, self._outermost.buffer_dtype or buffer.dtype) for buffer, _ in real(self)]


WRONG: dict[str, Callable[..., Any]] = {
    "a-shared-module-casts-for-its-first-holder": lambda real, self, module, name, above, around: (
        self._seen[id(module)] if id(module) in self._seen else real(self, module, name, above, around)
    ),
    "unlisted-parameters-have-the-dtype-of-the-outermost": lambda real, self, parameter: self._outermost.unlisted(
        parameter.dtype
    ),
    "what-no-sync-left-is-not-reduced": lambda real, self: (
        () if any(bucket.grad.has_sum for bucket in self.buckets) else real(self)
    ),
    "each-rank-has-its-own-idea-of-what-was-used": lambda real, self, used: real(self, [self.used()]),
    "from-the-second-step-on-views-are-elsewhere": lambda real, self, flat: real(
        self, flat.roll(self.begin + 1) if self.views else flat
    ),
    "means-are-read-while-they-travel": lambda real, *arguments: (real(*arguments), Chain(()))[1],
    "a-sum-does-not-come-home": lambda real, self, out, tag: real(self, out.clone(), tag),
    "owners-by-another-number": lambda real, self, index: (
        [rank - self._transport.rank + self._shard_group.rank for rank in real(self, index)]
    ),
    "weights-are-averaged": lambda real, self, bucket, slot, gradient: real(
        self, bucket, slot, bucket.parameters[slot].detach()
    ),
    "small-gradients-are-scaled-up": lambda real, norm, max_norm: max_norm / (norm + 1e-6),
    "the-norm-of-the-first-bucket": lambda real, self, pieces_of: real(self, pieces_of)[:1],
    "the-infinity-norm-is-one": lambda real, self: 1.0 if self.norm_type == math.inf else real(self),
    "the-norm-of-this-rank": lambda real, self, max_norm, p, error, _: real(
        self, max_norm, p, error, [self.norm_part(p)]
    ),
    "an-unused-parameter-decides-the-norms-dtype": lambda real, self: any(
        bucket.spec.dtypes.accumulate_dtype is torch.float64 for bucket in self._buckets
    ),
    "a-rank-without-gradients-returns-at-once": lambda real, self, *arguments: (
        real(self, *arguments) if self._means.shards() else torch.zeros(())
    ),
    "the-last-slice-is-never-updated": lambda real, self, present, cut: real(
        self, present[:-1] + b"\0" if present and self.end == self.bucket.numel else present, cut
    ),
    "matrices-are-stepped-for-each-micro-batch": lambda real, optimizer: lambda: (real(optimizer)(), real(optimizer)()),
    "another-optimizer-than-was-asked-for": lambda real, states, groups: (
        [{**group, "fused": False} if "fused" in group else group for group in real(states, groups)]
    ),
    "a-model-made-in-16-bits-has-no-wide-masters": lambda real, self, dtype: replace(
        real(self, dtype), master_dtype=dtype
    ),
    "an-exact-fit-is-refused": lambda real, parameters, world, size, **others: real(
        parameters, world, size - 1, **others
    ),
    "names-are-not-in-the-digest": lambda real, self: real(self).partition(" ")[2],
    "a-whole-model-gets-memory-first": lambda real, self, entries: (
        list(self._materializer.steps() if self._materializer else ()),
        real(self, entries),
    )[1],
    "weights-are-shown-before-they-arrive": lambda real, *arguments: (real(*arguments), Chain(()))[1],
    "the-loaders-loop-is-empty": lambda real, state, *others: real({}, *others),
    "step-counts-are-not-loaded": lambda real, name, value, *others: real(
        name, torch.zeros_like(value) if isinstance(value, torch.Tensor) else value, *others
    ),
    "frozen-weights-are-lost": lambda real, self, buffers: real(
        self, [buffer for buffer in buffers if any(each.requires_grad for each in buffer.parameters)]
    ),
    "old-names-of-a-compiled-model-fit-no-model": lambda real, values, known: dict(values),
    "buffers-of-a-state-dict-change-later": lambda real, tensor: tensor.detach(),
    "loaded-masters-are-rounded": lambda real, self, bucket, whole, wide: real(self, bucket, whole, frozenset()),
    "a-gradient-that-was-made-is-divided-once-more": lambda real, self, bucket, slot, purpose: bucket.replace(slot),
    "no-gradient-is-a-zero-gradient": lambda real, self, bucket, slot: self._zero(bucket, slot, known=True),
    "buffers-of-ignored-modules-are-rank-0s": lambda real, self, tensor: (
        real(self, tensor) and isinstance(tensor, torch.nn.Parameter)
    ),
    "the-norm-without-the-experts": lambda real, first, also: real(first, also)[:0],
    "a-norm-along-two-groups-counts-replicas-twice": lambda real, self: replace(
        real(self), own=self.own.merge(self.shared).merge(self.shared)
    ),
    "only-the-first-group-is-added-up": lambda real, self, groups: real(
        self, groups[:1] if isinstance(groups, list) else groups
    ),
    "a-unit-that-is-compiled-later-is-said-to-be-broken": lambda real, self, owner, *rest: (
        real(self, owner, *rest),
        setattr(self, "_called", self._surrounded),
    )[0],
    "a-refused-argument-stays-on-its-rank": lambda real, self, replicated, problem: real(self, replicated, None),
    "what-is-ignored-is-listed": lambda real, params, ignored=(): real(params),
    "an-argument-with-a-name-of-ours-is-dropped": lambda real, arguments, kwargs: (
        {key: value for key, value in real(arguments, kwargs).items() if key != "stage"}
    ),
    "a-compiled-model-has-names-of-its-own": lambda real, module, *, remove_duplicate=True: module.named_modules(
        remove_duplicate=remove_duplicate
    ),
}
"""The bugs that an expression makes, by name."""
