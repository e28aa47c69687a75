"""The use of finalized gradients: clip them, update this rank's intervals, gather the updated parameters.

Knows: the order of these. Does not know: the user's calls, and what the ranks agree on before.

    clip:    norm of all shards, one factor                            all ranks
    update:  the user's optimizer on this rank's intervals             each rank alone
    gather:  the shards of all owners, if the stage keeps them whole  all ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import methodcaller
from typing import Protocol

import torch
from torch import Tensor

from collectives import Collective, Kind, Pipeline, PipelineStage, Tag, Transport, Work, as_a_whole, behind_a_meeting
from collectives.kernels import NORM_TYPES, kernels_of

from ..core.norm import PowerSum
from ..core.stage import GATHERS_IN_FLIGHT, Stage
from ..runtime.bucket import Bucket
from ..runtime.flat_buffer import FlatBuffer, redistribute
from ..runtime.flat_states import Options
from ..runtime.offload import wait_for_host
from ..runtime.profiler_ranges import ProfilerRange, Waited
from .classes import UserOptimizers
from .clip import ON_DEVICE, check_finite, clip_factor, clip_on_device
from .user_optimizer import BucketUpdate, Call, Mode, all_present, unhooked_step

_Work = tuple[Bucket, FlatBuffer | None, bytes]  # a bucket, its gradient, and which of its pieces a call changes


class _Means(Protocol):
    """The mean gradients of the shards that this rank owns, as in `ReducedGrads`."""

    def shards(self) -> list[Tensor]: ...

    def held(self, *, keeps_minus_zero: bool = False) -> list[Tensor]: ...


class _Parameters(Protocol):
    """The parameters of the model, as in a `ParameterStorage`."""

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def stepping(self) -> None:
        """Note that buckets will be updated."""

    def loading(self) -> None:
        """Note that all parameters will change."""

    def stepped(self) -> None:
        """Note that all buckets were updated."""


class UpdateListener(Protocol):
    """An object that reads states while training goes on, as a save does."""

    def before_step(self, reports: Sequence[Mapping[str, str]]) -> None:
        """Note that all ranks have agreed to a step. ``reports``: of `Agreement`, by rank."""

    def before_update(self, bucket: int) -> None:
        """Return when the states of a bucket, given by its index, may change."""


class Update:
    """The clip and the step of one optimizer on one rank. All ranks must call each, after `Reducer.finalize_grads`."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        shard_group: Transport,
        collective: Collective,
        storage: _Parameters,
        means: _Means,
        user_optimizers: UserOptimizers,
    ) -> None:
        self._stage, self._transport, self._collective = stage, transport, collective
        self._storage, self._means, self._user_optimizers = storage, means, user_optimizers
        self.watchers: list[UpdateListener] = []
        self._shard_group, self._place, self._pool = shard_group, shard_group.rank, shard_group.pool
        self._is_first_copy = transport.rank < shard_group.world_size  # among the ranks that hold the same shards

    def clip_message(self, norm_type: float, error_if_nonfinite: bool, *, are_means: bool) -> bytes:
        """Return what this rank sends to all before a clip: that it could clip on the device, or its `norm_part`.

        The part is left out unless the gradients ``are_means`` already. The host must have the norm to raise if it is
        not finite.
        """
        if norm_type == 2.0 and not error_if_nonfinite and self._device and kernels_of(self._device):
            return ON_DEVICE
        return self.norm_part(norm_type) if are_means else b""

    @property
    def _device(self) -> torch.device | None:
        """The device of all gradients, if it is one and kernels know all their dtypes."""
        specs = [bucket.spec for bucket in self._storage.buckets]
        if not specs or any(spec.offloaded or spec.dtypes.accumulate_dtype not in NORM_TYPES for spec in specs):
            return None
        return torch.device(specs[0].device) if len({spec.device for spec in specs}) == 1 else None

    def norm_sum(self, norm_type: float) -> PowerSum:
        """Return this rank's part of the norm of the means: over all ranks, every element once."""
        pieces = self._means.shards() if self._is_first_copy else []
        return PowerSum.of(pieces, norm_type)  # host synchronisation: exact integers, which devices do not have

    def norm_part(self, norm_type: float) -> bytes:
        """Return `norm_sum` as a message."""
        return self.norm_sum(norm_type).to_bytes()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, parts: list[bytes]) -> Tensor:
        """Scale the means by one factor; return the norm before, 0-dim, of the dtype of `PowerSum.norm`. Collective.

        ``parts``: every rank's `clip_message`; empty if they were of other gradients. Raises `RuntimeError` on every
        rank, before any scaling, if ``error_if_nonfinite`` and the norm is inf or NaN. The norm is on the device if all
        ranks clip there, and else on the host.
        """
        if set(parts) == {ON_DEVICE}:
            return self._clip_on_device(max_norm)
        if not parts or not all(parts) or ON_DEVICE in parts:
            parts = self._transport.exchange(self.norm_part(norm_type), Tag(Kind.EXCHANGE, "gradient norm"))
        norm = reduce(PowerSum.merge, map(PowerSum.from_bytes, parts)).norm()
        return self.scale(norm, max_norm, norm_type, error_if_nonfinite)

    def scale(self, norm: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the means by the factor of a norm on the host, and return the norm. Local. See `clip`."""
        if error_if_nonfinite:
            check_finite(norm, norm_type)
        factor = clip_factor(norm, max_norm)
        if not bool(factor == 1.0):  # no host synchronisation: it is in the host's memory
            for gradient in self._means.held(keeps_minus_zero=bool(factor.isfinite())):
                gradient.mul_(factor)  # a factor on the host, as in a plain loop: no copy, and one rounding
        return norm

    def _clip_on_device(self, max_norm: float) -> Tensor:
        device = self._device
        assert device is not None
        kernels = kernels_of(device)
        assert kernels is not None
        shards = self._means.shards()
        with behind_a_meeting(self._transport), as_a_whole(self._transport, "while clipping"):
            group = self._shard_group
            return clip_on_device(kernels, device, shards, self._means.held(), max_norm, group, self._collective)

    def step(self, groups: Sequence[Options]) -> dict[int, Options]:
        """Update every parameter that some rank used. Collective.

        Returns the options that the user's class changed, by the param group's number.
        """
        self._storage.stepping()
        work = [
            (bucket, bucket.grad.final_grad(), bytes([bucket.used[piece.slot] for piece in bucket.states.pieces]))
            for bucket in self._storage.buckets
        ]
        return self._run(work, [bucket.spec.index for bucket, *_ in work if 1 in bucket.used], groups, unhooked_step)

    def set_mode(self, groups: Sequence[Options], mode: Mode) -> dict[int, Options]:
        """Let the classes that have modes exchange the weights for those of ``mode``. Collective.

        Returns like `step`.
        """
        self._storage.loading()
        work: list[_Work] = [
            (bucket, None, all_present(bucket.states))
            for bucket in self._storage.buckets
            if self._user_optimizers[bucket.specs[0].optimizer_class].has_modes
        ]
        return self._run(work, [bucket.spec.index for bucket, *_ in work], groups, methodcaller(mode))

    def _run(
        self, work: Sequence[_Work], changed: Sequence[int], groups: Sequence[Options], call: Call
    ) -> dict[int, Options]:
        """Make a call of the user's classes over buckets. ``changed``: those that change on some rank."""
        gathers = Pipeline(PipelineStage(GATHERS_IN_FLIGHT, self._gather))
        gathered = self._stage.parameters_are_gathered and self._shard_group.world_size > 1
        if gathered:
            gathers.begin_round(changed)

        def update(bucket: Bucket, gradient: FlatBuffer | None, present: bytes) -> BucketUpdate:
            def begin() -> None:
                for watcher in self.watchers:
                    watcher.before_update(bucket.spec.index)

            return BucketUpdate(
                bucket.states,
                gradient,
                present,
                self._event("update", bucket.spec.index),
                partial(gathers.ready, bucket.spec.index) if gathered else None,
                begin if self.watchers else None,
                bucket.specs[0].optimizer_class,
            )

        specs = [bucket.spec for bucket, *_ in work]
        wait_for_host(spec for spec in specs if spec.stepped_on_host)  # copies for gathers may still read weights
        with behind_a_meeting(self._transport):
            options = self._user_optimizers.step([update(*each) for each in work], groups, call)
            gathers.finish()
        self._pool.drop_cheap()
        wait_for_host(spec for spec in specs if not spec.stepped_on_host)
        self._storage.stepped()
        return options

    def _gather(self, index: int) -> Work:
        bucket = self._storage.buckets[index]
        weights, cuts = bucket.weights, bucket.spec.cuts
        tag = Tag(Kind.ALL_GATHER, f"parameters of bucket {index}", index=index)
        with self._event("all_gather", index)():
            work = redistribute(weights.shard(cuts, self._place), weights, cuts, self._collective, tag)
            return Waited(work, self._event("wait_for_all_gather", index))

    def _event(self, what: str, bucket: int) -> ProfilerRange:
        return ProfilerRange(f"{what} bucket {bucket}", self._transport.rank_label)
