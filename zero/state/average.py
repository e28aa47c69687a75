"""`ShardedAverage`: a running average of the weights, of which each rank keeps those that it updates.

Knows: the weights of a rank, bucket by bucket. Does not know: how they are trained, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn

from collectives import Kind, Tag

from ..core.bits import same_bits, strided
from ..core.stage import Placement
from ..core.statetree import AVERAGE_NAME
from ..runtime.bucket import Bucket
from ..runtime.flat_buffer import FlatBuffer, gather_slot

AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
MultiAvgFn = Callable[[list[Tensor], list[Tensor], Any], object]
_TRIED = (96, 32)  # elements of a throw-away tensor, and of each part of it


class ShardedAverage:
    """An average of the weights of a `ZeroOptimizer`, as `torch.optim.swa_utils.AveragedModel` keeps one of a model.

    A rank keeps the average of the weights that it updates: 1/W of them from stage 1 on. With mixed precision these are
    the master weights. The first update copies the weights. The values are those that AveragedModel has in the plain
    loop, bit for bit. Checkpoints have it in ``averages/<name>``, and restore it.

    Parameters that are in no param group are not averaged, nor are buffers: those of the model are used.
    """

    def __init__(
        self,
        optimizer: Any,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        *,
        name: str = "average",
    ) -> None:
        """All ranks.

        Args:
            optimizer: the `ZeroOptimizer` whose weights are averaged.
            avg_fn: ``avg_fn(average, weights, n_averaged)`` returns the new average. It must be element-wise. None: the
                mean of all weights that were seen.
            multi_avg_fn: ``multi_avg_fn(averages, weights, n_averaged)`` updates lists of averages in place, as
                `torch.optim.swa_utils.get_ema_multi_avg_fn` returns one.
            name: of the folder in checkpoints; an optimizer may have several averages.

        Raises:
            TypeError: ``optimizer`` is no `ZeroOptimizer`.
            ValueError: both functions are given, the function is not element-wise, or ``name`` is no name of a folder,
                or that of another average.
        """
        engine: Any = getattr(optimizer, "engine", None)
        if not hasattr(engine, "averages"):
            raise TypeError(
                f"a ShardedAverage is one of a ZeroOptimizer's weights, not of a {type(optimizer).__name__}'s: for a "
                "plain model use torch.optim.swa_utils.AveragedModel"
            )
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("give avg_fn or multi_avg_fn, not both")
        if not AVERAGE_NAME.fullmatch(name):
            raise ValueError(f"name is {name!r:.200}: it must be one that a folder can have, of letters and digits")
        if name in engine.averages:
            raise ValueError(f"the optimizer has an average {name!r} already: give this one another name=, or close()")
        self.name, self.n_averaged = name, 0
        self._optimizer, self._engine = optimizer, engine
        self._avg_fn = None if multi_avg_fn is not None else avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
        self._multi_avg_fn = multi_avg_fn
        self._flat: dict[int, FlatBuffer] = {}  # by the index of the bucket
        self._check_function()
        engine.averages[name] = self

    def update_parameters(self, model: Any = None) -> None:
        """Take the weights of this moment into the average. Local; every rank must make the call, between two steps.

        ``model`` is ignored: it may be given, as to AveragedModel.
        """
        self._require_open()
        self._engine.update_average(average=self.name)

    @torch.no_grad()
    def take(self) -> None:
        """Take the weights of this moment into the average, on this rank."""
        for bucket in self._buckets():
            bucket.states.wait_for_copies()
            weights = self._weights(bucket)
            flat = self._flat.get(bucket.spec.index)
            if flat is None or self.n_averaged == 0:
                self.buffer(bucket).data.copy_(weights.data)
            else:
                self._take(_pieces(bucket, flat), _pieces(bucket, weights))
            bucket.states.evict()
        self.n_averaged += 1

    def gather(self, to: int | None = 0) -> dict[str, Tensor] | None:
        """Return the whole averages by the parameters' names on rank ``to``, or on every rank if it is None. All ranks.

        They are on the device of the weights. On other ranks the result is None. Raises `RuntimeError` before the first
        update.
        """
        self._require_values()
        found: dict[str, Tensor] | None = self._engine.gather_average(average=self.name, to=to)
        return found

    def whole(self, to: int | None) -> dict[str, Tensor] | None:
        """Return the whole averages, as `gather` does."""
        here = to in (None, self._engine.parts.transport.rank)
        found: dict[str, Tensor] = {}
        for bucket, number in self._slots():
            whole = self._whole(bucket, number)
            if here:
                found[bucket.specs[number].name] = whole
        return found if here else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the model computes with the averages, rounded to its dtype. All ranks.

        No step, backward or save may be inside. The weights come back as they were. While it begins and ends, a rank
        has one whole parameter of each.
        """
        self._require_values()
        kept = [bucket.updated_weights(*self._place()).data.clone() for bucket in self._buckets()]
        self._write([self._flat[bucket.spec.index].data for bucket in self._buckets()])
        try:
            yield
        finally:
            self._write(kept)

    def close(self) -> None:
        """Forget the average: checkpoints leave it out from now on. All ranks."""
        self._engine.averages.pop(self.name, None)
        self._flat.clear()

    # -- for checkpoints ----------------------------------------------------------------------------------------------

    def buffer(self, bucket: Bucket) -> FlatBuffer:
        """Return the memory of a bucket's average, in the dtype of the master weights, with any values at first."""
        number = bucket.spec.index
        if number not in self._flat:
            of = bucket.updated_weights(*self._place())
            data = torch.empty(of.data.numel(), dtype=bucket.spec.dtypes.master_dtype, device=of.data.device)
            self._flat[number] = FlatBuffer(data, of.placement, of.begin)
        return self._flat[number]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[Any, int]:
        return self._engine.parts.stage, self._engine.parts.shards.rank

    def _buckets(self) -> Sequence[Bucket]:
        found: Sequence[Bucket] = self._engine.parts.storage.buckets
        return found

    def _slots(self) -> Iterator[tuple[Bucket, int]]:
        """Yield bucket and slot of each parameter, in the order of torch.optim's indices."""
        slots = [(bucket, number) for bucket in self._buckets() for number in range(len(bucket.specs))]
        yield from sorted(slots, key=lambda slot: slot[0].specs[slot[1]].index)

    def _weights(self, bucket: Bucket) -> FlatBuffer:
        """Return the weights with which the next step would begin, of the interval that this rank updates."""
        states = bucket.states
        of = bucket.updated_weights(*self._place())
        return FlatBuffer(states.synced_weights().detach(), of.placement, of.begin)

    def _take(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        count = torch.tensor(self.n_averaged)
        if self._multi_avg_fn is not None:
            if averages:
                self._multi_avg_fn(averages, weights, count.to(averages[0].device))
            return
        assert self._avg_fn is not None
        for average, current in zip(averages, weights, strict=True):
            average.copy_(self._avg_fn(average, current, count.to(average.device)))

    def _whole(self, bucket: Bucket, number: int) -> Tensor:
        """Return a parameter's average, in its shape."""
        parts, spec = self._engine.parts, bucket.specs[number]
        flat, slot = self._flat[bucket.spec.index], bucket.spec.slots[number]
        if flat.placement is Placement.WHOLE:
            return flat.slot(slot, spec).detach().clone()
        tag = Tag(Kind.ALL_GATHER, f"average {self.name}: {spec.name}"[:70], index=bucket.spec.index)
        own = flat.shard(bucket.spec.cuts, parts.shards.rank)
        whole = gather_slot(own, slot, bucket.spec.cuts, parts.shards.rank, parts.collective, tag)
        return strided(whole, 0, spec.shape, spec.stride)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        """Give the model these values, of the intervals that ranks update."""
        held = [
            FlatBuffer(data, bucket.updated_weights(*self._place()).placement, self._flat[bucket.spec.index].begin)
            for bucket, data in zip(self._buckets(), values, strict=True)
        ]
        numbers = {bucket.spec.index: place for place, bucket in enumerate(self._buckets())}
        before, self._flat = self._flat, {index: held[place] for index, place in numbers.items()}
        try:
            for bucket, number in self._slots():
                parameter = bucket.parameters[number]
                whole = self._whole(bucket, number)
                with self._optimizer.gathered(parameter, write=True):
                    parameter.copy_(whole)
        finally:
            self._flat = before

    def _require_open(self) -> None:
        self._engine.check()
        if self._engine.averages.get(self.name) is not self:
            raise RuntimeError(f"the average {self.name!r} is closed: build a new one")

    def _require_values(self) -> None:
        self._require_open()
        if self.n_averaged == 0:
            raise RuntimeError(f"the average {self.name!r} has no values yet: call update_parameters() after a step")

    def _check_function(self) -> None:
        """Raise `ValueError` if the function gives other bits for parts of a tensor than for the whole."""
        size, part = _TRIED
        generator = torch.Generator().manual_seed(0)
        averages, weights = (torch.randn(size, generator=generator) for _ in range(2))
        by_part = averages.clone()
        self.n_averaged = 1
        try:
            self._take([averages], [weights])
            cut = [slice(begin, begin + part) for begin in range(0, size, part)]
            self._take([by_part[piece] for piece in cut], [weights[piece] for piece in cut])
        finally:
            self.n_averaged = 0
        if not same_bits(averages, by_part):
            raise ValueError(
                "the function of a ShardedAverage must be element-wise, since a rank has parts of tensors: it gives "
                "other values for parts than for the whole"
            )


def _pieces(bucket: Bucket, flat: FlatBuffer) -> list[Tensor]:
    """Return the pieces of slots, as views. A parameter without dimensions keeps that shape: kernels differ by it."""
    pieces = [piece for piece in bucket.spec.pieces(flat.begin, flat.end) if piece.numel]
    scalar = [bucket.specs[piece.slot].shape == () for piece in pieces]
    found = zip(map(flat.piece, pieces), scalar, strict=True)
    return [piece.view(()) if is_scalar else piece for piece, is_scalar in found]
