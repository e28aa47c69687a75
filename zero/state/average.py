"""`ShardedAverage`: a running average of the weights, of which each rank keeps those that it updates.

Knows: the weights of a rank, bucket by bucket, and how the model computes with others for a while. Does not know: how
they are trained, files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn

from collectives import Collective, Kind, Tag, Transport, as_a_whole

from ..core.bits import same_bits, strided
from ..core.conflicts import AVERAGE
from ..core.stage import Stage
from ..core.statetree import N_AVERAGED, check_average_name
from ..gradients.reducer import Reducer
from ..parameters.storage import ParameterStorage
from ..runtime.bucket import Bucket
from ..runtime.compiled_calls import untraced_methods
from ..runtime.flat_buffer import FlatBuffer, Move, redistribute, usable_later
from .gather import whole_of

AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
MultiAvgFn = Callable[[list[Tensor], list[Tensor], Any], object]
_TRIED = ((97, [32, 32, 33]), (64, [64]))  # elements of throw-away tensors, and of their parts


@untraced_methods
class ShardedAverage:
    """An average of the weights of a `ZeroOptimizer`, like `torch.optim.swa_utils.AveragedModel` for a plain model.

    A rank keeps the average of the weights that it updates: 1/W of them from stage 1 on. With mixed precision these are
    the master weights. The first update copies the weights. The values equal those of AveragedModel in the plain loop,
    bit for bit. Checkpoints store them in ``averages/<name>``, and restore them together with the states.

    Parameters in no param group, and buffers, are not averaged: those of the model are used. The average takes as much
    memory as one state of the optimizer; `describe` does not count it.

    Attributes:
        name: the name of the average, and of its folder in checkpoints.
        n_averaged: the number of updates so far.
    """

    def __init__(
        self,
        optimizer: Any,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        *,
        name: str = "average",
    ) -> None:
        """Start an average. All ranks.

        Args:
            optimizer: the `ZeroOptimizer` whose weights are averaged.
            avg_fn: ``avg_fn(average, weights, n_averaged)`` returns the new average. It must be element-wise, and gets
                1-D parts of parameters. None: the mean of all weights so far.
            multi_avg_fn: ``multi_avg_fn(averages, weights, n_averaged)`` updates lists of such parts in place, like the
                function that `torch.optim.swa_utils.get_ema_multi_avg_fn` returns. It is called once per bucket.
            name: the folder's name in checkpoints; an optimizer may have several averages.

        Raises:
            TypeError: ``optimizer`` is no `ZeroOptimizer`.
            ValueError: both functions are given, the function is not element-wise, ``name`` is no name of a folder, or
                that of another average, or a parameter is called "n_averaged", which a checkpoint keeps for the count.
        """
        engine: Any = getattr(optimizer, "_engine", None)
        averages = getattr(engine, "averages", None)
        if not isinstance(averages, Averages):
            raise TypeError(
                f"a ShardedAverage averages the weights of a ZeroOptimizer, not of {type(optimizer).__name__}: for a "
                "plain model use torch.optim.swa_utils.AveragedModel"
            )
        engine.check()
        if any(bucket.spec.offloaded for bucket in averages.storage.buckets):
            raise ValueError(AVERAGE.text())
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("give avg_fn or multi_avg_fn, not both")
        check_average_name(name)
        if name in averages.by_name:
            raise ValueError(f"the optimizer has an average {name!r} already: give this one another name=, or close()")
        self.name, self.n_averaged, self._engine, self._all = name, 0, engine, averages
        if any(spec.name == N_AVERAGED for bucket in self._buckets() for spec in bucket.specs):
            raise ValueError(
                f"a parameter has the name {N_AVERAGED!r}, which a checkpoint keeps for the count: rename it"
            )
        self._avg_fn = None if multi_avg_fn is not None else avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
        self._multi_avg_fn = multi_avg_fn
        self._flat: dict[int, FlatBuffer] = {}  # by the index of the bucket
        self._check_function()
        averages.by_name[name] = self

    def update_parameters(self, model: Any = None) -> None:
        """Update the average with the current weights. Local; every rank must make the call, between two steps.

        ``model`` is ignored; it is there because AveragedModel takes one.
        """
        self._require_open()
        self._engine.update_average(average=self.name)

    def gather(self, to: int | None = 0) -> dict[str, Tensor] | None:
        """Return the whole averages by parameter name on rank ``to``, or on every rank if it is None. All ranks.

        They are on the weights' device. On the other ranks the result is None. Raises `RuntimeError` on every rank
        before the first update, and `ValueError` if the ranks have averaged different numbers of weights.
        """
        self._require_open()
        found: dict[str, Tensor] | None = self._engine.gather_average(average=self.name, to=to)
        return found

    def applied(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the averages, rounded to its dtype. All ranks.

        Afterwards the weights are what they were. Inside, steps, saves, loads and updates of averages are errors; a
        backward is an error when the block ends. Raises like `gather`, and if there are gradients that no step has
        used.
        """
        self._require_open()
        found: AbstractContextManager[None] = self._engine.apply_average(average=self.name)
        return found

    def close(self) -> None:
        """Drop the average: later checkpoints leave it out. All ranks."""
        if self._all.by_name.get(self.name) is self:
            del self._all.by_name[self.name]
        self._flat.clear()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"the ShardedAverage {self.name!r} cannot be copied or pickled: it belongs to an optimizer, each of whose "
            "ranks has a part; gather() returns its values, and a checkpoint has them"
        )

    # -- for the engine and for checkpoints ---------------------------------------------------------------------------

    @torch.no_grad()
    def take(self) -> None:
        """Take the weights of this moment into the average, on this rank. Internal."""
        for bucket in self._buckets():
            weights, index = bucket.states.synced_weights(), bucket.spec.index
            if index not in self._flat or self.n_averaged == 0:
                self.room(bucket).data.copy_(weights.data)
            else:
                self._update(_pieces(bucket, self._flat[index]), _pieces(bucket, weights), self.n_averaged)
        self.n_averaged += 1

    def values(self, bucket: Bucket) -> FlatBuffer:
        """Return the average of the part of a bucket that this rank updates, in the dtype of the master weights.

        Parameters that no update has seen have their weights. Internal.
        """
        if bucket.spec.index not in self._flat:
            self.room(bucket).data.copy_(bucket.states.synced_weights().data)
        return self._flat[bucket.spec.index]

    def room(self, bucket: Bucket) -> FlatBuffer:
        """Return the memory of `values`, which has any values if it is new. Internal."""
        number = bucket.spec.index
        if number not in self._flat:
            states = bucket.states
            with usable_later():
                size, dtype = states.end - states.begin, bucket.spec.dtypes.master_dtype
                self._flat[number] = states.over(torch.empty(size, dtype=dtype, device=states.master.device))
        return self._flat[number]

    def apply(self, move: Move) -> None:
        """Replace each tensor by what ``move`` returns for it. Internal."""
        for flat in self._flat.values():
            flat.apply(move)

    def whole(self, to: int | None) -> dict[str, Tensor] | None:
        """Return the whole averages, as `gather` does. Internal."""
        found: list[tuple[int, str, Tensor]] = []
        for bucket in self._buckets():
            tag = Tag(Kind.GATHER, f"average {self.name}"[:70], index=bucket.spec.index)
            whole = whole_of(
                partial(self.values, bucket), bucket.spec, to, self._all.transport, self._all.shard_group, tag
            )
            if whole is not None:
                for slot, spec in zip(bucket.spec.slots, bucket.specs, strict=True):
                    found.append((spec.index, spec.name, strided(whole, slot.offset, spec.shape, spec.stride).clone()))
        if to not in (None, self._all.transport.rank):
            return None
        return {name: average for _, name, average in sorted(found, key=lambda each: each[0])}

    # -- parts --------------------------------------------------------------------------------------------------------

    def _buckets(self) -> Sequence[Bucket]:
        return self._all.storage.buckets

    def _update(self, averages: list[Tensor], weights: list[Tensor], count: int) -> None:
        seen = torch.tensor(count, device="cpu")
        if self._multi_avg_fn is not None:
            if averages:
                self._multi_avg_fn(averages, weights, seen.to(averages[0].device))
            return
        assert self._avg_fn is not None
        for average, current in zip(averages, weights, strict=True):
            average.copy_(self._avg_fn(average, current, seen.to(average.device)))

    def _require_open(self) -> None:
        self._engine.check()
        if self._all.by_name.get(self.name) is not self:
            raise RuntimeError(f"the average {self.name!r} is closed: build a new one")

    def _check_function(self) -> None:
        """Raise `ValueError` if the function gives other bits for parts than for whole tensors together."""
        host, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
        averages, weights = ([torch.randn(n, generator=generator, device=host) for n, _ in _TRIED] for _ in range(2))
        apart = [average.clone() for average in averages]
        try:
            self._update(averages, weights, 1)
            for mine, theirs, (_, sizes) in zip(apart, weights, _TRIED, strict=True):
                for part, other in zip(torch.split(mine, sizes), torch.split(theirs, sizes), strict=True):
                    self._update([part], [other], 1)
        except Exception as error:
            raise ValueError(
                f"the function of a ShardedAverage failed on 1-D tensors ({type(error).__name__}: {error}): it must "
                "be element-wise, since a rank has parts of parameters"
            ) from error
        if not all(map(same_bits, averages, apart)):
            raise ValueError(
                "the function of a ShardedAverage must be element-wise, since a rank has parts of parameters: it gives "
                "other values for parts than for whole tensors"
            )


class Averages:
    """The averages of one optimizer, and what its ranks agree on before they use one. Collective but for `update`."""

    def __init__(
        self,
        stage: Stage,
        storage: ParameterStorage,
        reducer: Reducer,
        transport: Transport,
        shard_group: Transport,
        collective: Collective,
    ) -> None:
        """``transport``: of all ranks; ``shard_group``: of those that share one copy."""
        self.stage, self.storage, self.reducer = stage, storage, reducer
        self.transport, self.shard_group, self.collective = transport, shard_group, collective
        self.by_name: dict[str, ShardedAverage] = {}
        self._applied = ""  # the name of the average with which the model computes

    def with_values(self) -> list[tuple[str, ShardedAverage]]:
        """Return the averages that have values, with their names, in order. Local."""
        return [(name, average) for name, average in sorted(self.by_name.items()) if average.n_averaged]

    def names(self) -> bytes:
        """Return the names as a message. Local."""
        return json.dumps(sorted(self.by_name)).encode()

    def compare(self, messages: Sequence[bytes]) -> None:
        """Raise `ValueError` on every rank unless all have sent equal `names`. Local."""
        found = [json.loads(names) for names in messages]
        for rank, names in enumerate(found):
            if names != found[0]:
                raise ValueError(
                    f"rank {rank} has the averages {names}, and rank 0 {found[0]}: build the same on all ranks"
                )

    @property
    def in_use(self) -> bool:
        """Whether the model computes with an average. Local."""
        return bool(self._applied)

    def refuse_applied(self, purpose: str) -> None:
        """Raise `RuntimeError` inside `applied`. Local."""
        if self._applied:
            raise RuntimeError(f"{purpose} inside applied() of the average {self._applied!r}: leave it first")

    def update(self, name: str) -> None:
        """Take the weights of this moment into an average. Local."""
        self.refuse_applied("update_parameters()")
        if name not in self.by_name:  # another rank has it, inside `join`
            rank = self.transport.rank
            raise RuntimeError(
                f"rank {rank} has no average {name!r}, which another rank updates: build it on all ranks"
            )
        self.by_name[name].take()

    def gather(self, name: str, to: int | None) -> dict[str, Tensor] | None:
        """Return a whole average on rank ``to``, or on every rank."""
        self._agree(name, f"gather() of the average {name!r}", None)
        return self.by_name[name].whole(to)

    @contextmanager
    def applied(self, name: str, purpose: str, problem: str | None) -> Iterator[None]:
        """Return a context in which the model's weights are an average. ``problem``: an error that this rank found."""
        if problem is None and self.reducer.has_new_gradients:
            problem = f"{purpose} with gradients that no step has used: call it after step() or zero_grad()"
        self._agree(name, purpose, problem)
        buckets = self.storage.buckets
        kept = [bucket.updated_weights(self.stage, self.shard_group.rank).data.clone() for bucket in buckets]
        self._replace_weights([self.by_name[name].values(bucket).data for bucket in buckets], purpose)
        self._applied = name
        try:
            yield
        finally:
            self._applied = ""
            self.storage.stepped()  # waits for all ranks, which may still read the averages in common memory
            self._replace_weights(kept, purpose)
        if self.reducer.has_new_gradients:
            raise RuntimeError(f"a backward inside {purpose}: its gradients are those of the average; call zero_grad()")

    def _agree(self, name: str, purpose: str, problem: str | None) -> None:
        """Raise on every rank unless all have an average with values of equally many weights."""
        found = self.by_name.get(name)
        count = 0 if found is None else found.n_averaged
        if problem is None and not count:
            problem = f"{purpose}: it has no values yet: call update_parameters() on all ranks, after a step"
        problem = problem or self.storage.diagnose()
        counts = [
            int(each.attachment) for each in self.reducer.check_consistency(purpose, problem, message=b"%d" % count)
        ]
        if len(set(counts)) > 1:
            raise ValueError(f"{purpose}: ranks have averaged {counts} weights: call update_parameters() on all ranks")

    @torch.no_grad()
    def _replace_weights(self, values: Sequence[Tensor], purpose: str) -> None:
        """Give the model these weights: of each bucket, those that this rank updates."""
        self.storage.loading()
        with as_a_whole(self.transport, f"in {purpose}", Exception):
            for bucket, value in zip(self.storage.buckets, values, strict=True):
                own, index = bucket.updated_weights(self.stage, self.shard_group.rank), bucket.spec.index
                own.data.copy_(value)
                if own.placement is not bucket.weights.placement and self.shard_group.world_size > 1:
                    tag = Tag(Kind.ALL_GATHER, f"{purpose}, bucket {index}"[:70], index=index)
                    redistribute(own, bucket.weights, bucket.spec.cuts, self.collective, tag).wait()
        self.storage.stepped()


def _pieces(bucket: Bucket, flat: FlatBuffer) -> list[Tensor]:
    """Return the pieces of slots, as views. A parameter without dimensions keeps that shape: kernels differ by it."""
    pieces = [piece for piece in bucket.spec.pieces(flat.begin, flat.end) if piece.numel]
    scalar = [bucket.specs[piece.slot].shape == () for piece in pieces]
    found = zip(map(flat.piece, pieces), scalar, strict=True)
    return [piece.view(()) if is_scalar else piece for piece, is_scalar in found]
