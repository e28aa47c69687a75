"""The runs as which one bucket's interval is stepped, the flat tensors of its states, and its master weights.

    interval of a bucket   | a a a b b b b . . c c |       . is padding, b ends ragged
    present, equal state     x x x x x x x     x x
    runs                   [ a a a b b b b ]   [ c c ]     1-D views; the class sees each as a parameter

A run merges neighbouring pieces of one group whose scalars are equal, and ends where padding follows, so that the last
elements of a parameter stay the last ones of a tensor: the class then does the same arithmetic as on the parameters
themselves. If the class loops over tensors, a run on the CPU is cut every `CUT` elements, which keeps it in the cache.
On an accelerator it is not cut: a launch costs more than a cache saves.

Where pieces are stepped by themselves (`Grain.alone`), a run is one piece, in the shape that its grain says. The class
may then keep states of any shape and in any memory order: those that do not lie as the parameter does count as scalars.

Master weights of mixed precision: wide weights for the update, beside the narrow parameters of the model.

    master weight (its owner) --- cast ---> parameter --- forward, backward ---> gradient         param_dtype
          ^                                                                         | contribution   reduce_dtype
          +------------ update <--- clip <--- divide <--- sum (its owner) <---------+ ordered sum    accumulate_dtype

Where units are gathered on an accelerator, the owner keeps no parameters beside its master weights: `RoundedShard`.
With stochastic rounding the owner keeps the parameters alone, and master weights exist during a step: `WideCopies`.

Knows: runs, master weights, and the two kinds of state that a class keeps for a parameter: tensors as large as the
parameter, which are views of flat tensors here, and scalars (the step count). Does not know: when a class steps, ranks,
the origin of gradients.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collectives.kernels import kernels_of

from ..core.bits import INTEGERS, host_readable, same_bits, strided
from ..core.layout import BucketSpec, ParameterSpec, Piece
from ..core.rounding import NARROW, WEIGHTS, WIDE, StochasticRounding, Stream, round_into
from ..core.runs import (
    CUT,
    PieceState,
    adjoins,
    copied_states,
    in_blocks,
    is_elementwise,
    may_lie_flat,
    parts,
    runs,
    stepped_shape,
    tensors_in,
    with_tensors,
)
from ..core.stage import Placement, step_device
from .flat_buffer import FlatBuffer, Move, usable_later
from .offload import OffloadedStates

_BLOCK = 1 << 16  # elements that stay in the cache while they are compared


class SteppedWeights:
    """The weights of one interval that a class steps, 1-D, on a rank that updates them: the parameters themselves."""

    def __init__(self, param: Tensor) -> None:
        """``param``: the interval's parameters, 1-D, in the dtype of the model."""
        self._param = param

    @property
    def values(self) -> Tensor:
        """The weights that the class steps."""
        return self._param

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._param.device

    @property
    def is_missing(self) -> bool:
        """Whether they have yet to be made: they were never stepped."""
        return False

    def kept(self) -> list[Tensor]:
        """Return the memory that is kept for them, beside the parameters or in their place."""
        return []

    def apply(self, move: Move) -> None:
        """Replace the tensors by what ``move`` returns for them."""
        self._param = move(self._param)

    def synced(self) -> Tensor:
        """Return the weights with which the next step would begin. Changes nothing."""
        return self._param

    def compared(self) -> list[tuple[Tensor, Tensor]]:
        """Return the master weights and the parameters that they follow; nothing if they are equal to these."""
        return []

    def followed(self) -> None:
        """Note that the master weights have followed the parameters."""

    def loaded(self) -> None:
        """Note that the master weights were loaded: parameters that are equal to them are kept once."""

    def settle(self) -> None:
        """Let master weights that are kept alone follow what was written beside them, which is then dropped."""

    def forget(self) -> None:
        """Drop the master weights: from now on they are equal to the parameters."""

    def casts(self, intervals: Iterable[tuple[int, int]], stepped: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of these intervals, and the master weights to round into them after an update.

        ``stepped``: a copy of the master weights that the class has stepped; None: it has stepped these.
        """
        return []


class MasterWeights(SteppedWeights):
    """The weights of one interval in the master's dtype.

    The model computes with the interval's parameters. If a parameter's element is not equal to its master weight,
    rounded, it was written from outside (an edit, a loaded checkpoint). It is then the weight, and the master follows.
    """

    def __init__(
        self, param: Tensor, dtype: torch.dtype, master: Tensor | None, empty: Callable[[], Tensor] | None = None
    ) -> None:
        """Create the master weights of an interval; they use no memory before they are needed.

        Args:
            param: the interval's parameters, 1-D, in the dtype of the model.
            dtype: of the master weights.
            master: their values, if known more precisely than from ``param``.
            empty: returns the memory for them, the same each time; None: new memory on the device of ``param``.
        """
        super().__init__(param)
        self._dtype, self._master, self._empty = dtype, master, empty

    @property
    def values(self) -> Tensor:
        """The master weights, made from the parameters if they do not exist yet."""
        if self._master is None:
            self._master = self._param.to(self._dtype) if self._empty is None else self._empty().copy_(self._param)
        return self._master

    @property
    def is_missing(self) -> bool:
        return self._master is None

    def kept(self) -> list[Tensor]:
        return [] if self._master is None else [self._master]

    def apply(self, move: Move) -> None:
        super().apply(move)
        self._master = None if self._master is None else move(self._master)

    def synced(self) -> Tensor:
        """Return a copy of the master weights as `sync_from_param` would leave them. Changes nothing."""
        if self._master is None:
            return self._param.to(self._dtype)
        copied = MasterWeights(self._param, self._dtype, self._master.clone())
        copied.sync_from_param()
        return copied.values

    def sync_from_param(self) -> None:
        """Take over the elements that were written into the parameters since the last cast."""
        sync_from_params([self])

    def compared(self) -> list[tuple[Tensor, Tensor]]:
        return [] if self._master is None else [(self._master, self._param)]

    def forget(self) -> None:
        self._master = None

    def casts(self, intervals: Iterable[tuple[int, int]], stepped: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        return [(self._param[b:e], (self.values if stepped is None else stepped)[b:e]) for b, e in intervals]


class RoundedShard(FlatBuffer):
    """The parameters of a shard, of which a rank keeps the master weights alone: they are rounded where they are read.

    What is written from outside (an edit, a loaded checkpoint) is kept beside the master weights until these follow it,
    in the next step.
    """

    __slots__ = ("_dtype", "_written", "master")

    def __init__(self, master: Tensor, dtype: torch.dtype, begin: int) -> None:
        """``master``: the master weights, 1-D; ``dtype``: of the parameters; ``begin``: the first element's number."""
        self.master, self.begin, self.placement = master, begin, Placement.SHARD
        self._dtype = dtype
        self._written: Tensor | None = None

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The parameters, writable: a copy is kept from now on."""
        if self._written is None:
            with usable_later():
                self._written = self.master.to(self._dtype)
        return self._written

    @property
    def end(self) -> int:
        return self.begin + self.master.numel()

    @property
    def device(self) -> torch.device:
        return self.master.device

    @property
    def source(self) -> Tensor:
        """The parameters, 1-D, in any dtype: rounded to theirs, they are what the model computes with."""
        return self.master if self._written is None else self._written

    def kept(self) -> list[Tensor]:
        return [] if self._written is None else [self._written]

    def apply(self, move: Move) -> None:
        self.master = move(self.master)
        self._written = None if self._written is None else move(self._written)

    def values(self) -> FlatBuffer:
        return FlatBuffer(self.source.to(self._dtype), self.placement, self.begin)

    def drop(self) -> None:
        """Drop the parameters that are kept: the master weights have followed them."""
        for written in self.kept():
            if written.device.type != "cpu":  # another stream may have allocated them, and would use the memory again
                written.record_stream(torch.accelerator.current_stream(written.device))
        self._written = None


class MastersAlone(MasterWeights):
    """The master weights of a `RoundedShard`."""

    def __init__(self, shard: RoundedShard) -> None:
        super().__init__(shard.master, shard.master.dtype, shard.master)
        self._shard = shard

    def synced(self) -> Tensor:
        followed = self._shard.master.clone()
        _follow([(followed, written) for written in self._shard.kept()])
        return followed

    def compared(self) -> list[tuple[Tensor, Tensor]]:
        return [(self._shard.master, written) for written in self._shard.kept()]

    def followed(self) -> None:
        self._shard.drop()

    def loaded(self) -> None:
        if all(same_bits(master.to(written.dtype), written) for master, written in self.compared()):
            self._shard.drop()

    def settle(self) -> None:
        self.sync_from_param()

    def forget(self) -> None:
        """Make the master weights equal to the parameters."""
        self._shard.master.copy_(self._shard.data)

    def casts(self, intervals: Iterable[tuple[int, int]], stepped: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return nothing: parameters are rounded where they are read."""
        return []


class WideCopies:
    """The fp32 copies of what an interval keeps in bf16: a class steps them, then they are rounded. There are none
    between two steps.

    ``tensors``: the copies, 1-D, by the names of states and `WEIGHTS`.
    """

    def __init__(
        self, rounding: StochasticRounding, bucket: BucketSpec, specs: Sequence[ParameterSpec], begin: int
    ) -> None:
        """``specs``: of each slot's parameter; ``begin``: the number of the interval's first element in the bucket."""
        self._rounding, self._bucket, self._specs, self._begin = rounding, bucket, specs, begin
        self.tensors: dict[str, Tensor] = {}

    def widen(self, kept: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return copies of what is in bf16, and the other tensors themselves."""
        self.tensors = {name: tensor.to(WIDE) for name, tensor in kept.items() if tensor.dtype is NARROW}
        return {**kept, **self.tensors}

    def room(self, name: str) -> Tensor:
        """Return the copy of a state, which is zeros if there was none."""
        if name not in self.tensors:
            self.tensors[name] = torch.zeros_like(self.tensors[WEIGHTS])
        return self.tensors[name]

    def check_apart(self, name: str, value: Tensor, piece: Piece) -> None:
        """Raise `ValueError` if a state that does not lie as its whole parameter does would have to be rounded."""
        if value.dtype in (NARROW, WIDE):
            raise ValueError(
                f"rounding: the state {name!r} of {self._specs[piece.slot].name!r} has another memory order or dtype "
                "than the parameter when it is stepped: make the parameter contiguous, or leave out rounding="
            )

    def round(self, piece: Piece, names: Iterable[str], kept: Mapping[str, Tensor], step: int) -> None:
        """Round the copies of ``names`` into what is ``kept``, in the elements of a piece. ``step``: its number."""
        spec, first = self._specs[piece.slot], self._bucket.within(piece).start
        place = slice(piece.begin - self._begin, piece.end - self._begin)
        for name in names:
            if name in self.tensors:
                stream = Stream.of(self._rounding.seed, spec.index, name, step)
                round_into(kept[name][place], self.tensors[name][place], stream, first, spec.shape, spec.stride)


def sync_from_params(masters: Sequence[SteppedWeights]) -> None:
    """Let each take over what was written into its parameters since the last cast."""
    _follow([pair for master in masters for pair in master.compared()])
    for master in masters:
        master.followed()


def _follow(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Let master weights follow parameters. A kernel takes all of a device in one launch."""
    by_kernel: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for master, param in pairs:
        kernels = kernels_of(param.device)
        if kernels is not None and kernels.can_follow(master, param):
            by_kernel.setdefault(param.device, []).append((master, param))
        else:
            _follow_by_operators(master, param)
    for device, together in by_kernel.items():
        kernels = kernels_of(device)
        assert kernels is not None
        kernels.follow([master for master, _ in together], [param for _, param in together])


def _follow_by_operators(all_masters: Tensor, all_params: Tensor) -> None:
    at_once = host_readable(all_params.device)
    block = _BLOCK if at_once else max(1, all_params.numel())
    for begin in range(0, all_params.numel(), block):
        param, master = all_params[begin : begin + block], all_masters[begin : begin + block]
        rounded = master.to(param.dtype)
        if at_once and same_bits(rounded, param):
            continue
        as_integers = INTEGERS[param.itemsize]
        written = rounded.view(as_integers) != param.view(as_integers)
        written &= ~(rounded.isnan() & param.isnan())  # a cast makes different NaNs at different places of a tensor
        master.copy_(torch.where(written, param.to(master.dtype), master))


Options = dict[str, Any]
_AROUND = (bisect.bisect_left, bisect.bisect_right)


@dataclass
class _FlatParam:
    """A run: a view of the weights that the class steps as one parameter. Parts of a cut run share their pieces."""

    parameter: Tensor  # 1-D; in the user's shape if that has no dimensions, or if the parameter is whole
    begin: int  # in the interval, as is the end
    end: int
    first: int  # index of its first piece in the interval
    last: int  # index of its last piece, + 1
    views: dict[str, Tensor] = field(default_factory=dict)  # of the flat tensors of its states

    def of(self, flat: Tensor) -> Tensor:
        """Return this run of a flat tensor over the interval, a view, in the shape and the strides of `parameter`."""
        return strided(flat, self.begin, self.parameter.shape, self.parameter.stride())


class BucketStates:
    """The optimizer states of one bucket's interval on this rank, and the runs over it."""

    def __init__(
        self,
        instance: torch.optim.Optimizer,
        bucket: BucketSpec,
        parameters: FlatBuffer,
        specs: Sequence[ParameterSpec],
        master: SteppedWeights | None = None,
        store: OffloadedStates | None = None,
        wide: WideCopies | None = None,
    ) -> None:
        """Create the states of an interval; there are none yet.

        Args:
            instance: of the user's class, for this bucket alone or for all that are stepped with it.
            bucket: the bucket.
            parameters: of the interval.
            specs: of each slot's parameter.
            master: the master weights, which are updated instead of the parameters; None: the parameters are.
            store: the memory of the states, if they are offloaded.
            wide: the copies in which the class steps what is rounded; None: nothing is.
        """
        self._store, self._wide, self.instance = store, wide, instance
        self._specs = specs
        self.alone = any(spec.grain.alone for spec in specs)  # all of them
        self.scalars = [spec.shape == () for spec in specs]
        self._cut = CUT if step_device(bucket) == "cpu" and not self.alone else None
        self.bucket, self.begin, self.end = bucket, parameters.begin, parameters.end
        self.master, self._placement = master or SteppedWeights(parameters.data), parameters.placement
        grains = [spec.grain for spec in specs]
        self.pieces = in_blocks(bucket.pieces(self.begin, self.end), bucket.slots, grains)
        self.groups = [specs[piece.slot].group for piece in self.pieces]
        self.flat: dict[str, FlatBuffer] = {}
        self._states: list[PieceState | None] = [None] * len(self.pieces)
        self.stepped_groups: set[int] = set()  # numbers of the groups of the runs
        self.runs: list[_FlatParam] = []
        self._key: tuple[Any, ...] | None = None

    @property
    def weights(self) -> Tensor:
        """The weights that are updated, 1-D: the master weights if there are any, else the parameters."""
        return self.master.values

    def over(self, data: Tensor) -> FlatBuffer:
        """Return a buffer of data over the interval."""
        return FlatBuffer(data, self._placement, self.begin)

    def masters(self) -> FlatBuffer | None:
        """Return the master weights as they are; None if there are none."""
        return next(map(self.over, self.master.kept()), None)

    def synced_weights(self) -> FlatBuffer:
        """Return the weights with which the next step would begin, in the master's dtype. Changes nothing."""
        self.wait_for_copies()
        found = self.over(self.master.synced())
        self.evict()
        return found

    def write_masters(self, whole: Tensor, slots: Set[int]) -> None:
        """Overwrite the master weights of the parameters in these slots. ``whole``: of the bucket, 1-D. The parameters
        must have been overwritten by the same values, rounded."""
        chosen = [piece for piece in self.pieces if piece.slot in slots]
        if chosen and self.bucket.dtypes.has_master:
            with self.writing():
                for piece in chosen:
                    self.over(self.weights).piece(piece).copy_(whole[piece.begin : piece.end])
                self.master.settle()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context in which states and master weights may be written, wherever they lie. Drops the runs."""
        self.wait_for_copies()
        self.snapshot()
        yield
        self.evict()

    def casts(self, present: bytes) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of the pieces that were ``present`` in a step, and the master weights to round into
        them."""
        stepped = None if self._store is None else self._store.on_device.get(WEIGHTS)
        return self.master.casts(self._intervals(present), stepped)

    def _intervals(self, present: bytes) -> Iterator[tuple[int, int]]:
        """Yield the begin and the end, within the interval, of neighbouring pieces that are ``present``."""
        for is_present, pieces in itertools.groupby(zip(self.pieces, present, strict=True), lambda pair: pair[1]):
            members = [piece for piece, _ in pieces]
            if is_present:
                yield members[0].begin - self.begin, members[-1].end - self.begin

    def plan(self, present: bytes, cut: frozenset[int]) -> None:
        """Make the runs over the pieces that are ``present``. ``cut``: the groups of which long runs are cut."""
        key = (present, cut)
        if key == self._key:
            return
        self.snapshot()
        self._key = key
        self.stepped_groups = set()
        for first, last in runs(self.pieces, present, self._joins):
            self._make_runs(first, last, self.groups[first] in cut)
            self.stepped_groups.add(self.groups[first])

    def _joins(self, index: int) -> bool:
        """Return True if the piece continues the run of the one before it."""
        if self.alone:
            return False
        before, state = self._states[index - 1], self._states[index]
        equal = state is None if before is None else before.same(state)
        return adjoins(self.pieces, self.groups, self.scalars, index) and equal

    def _make_runs(self, first: int, last: int, cut: bool) -> None:
        begin, end = self.pieces[first].begin - self.begin, self.pieces[last - 1].end - self.begin
        weights, state, piece = self.weights, self._states[first], self.pieces[first]
        spec, at = self._specs[piece.slot], self.bucket.within(piece).start
        for low, high in parts(begin, end, self._cut if cut else None):
            parameter = strided(weights.detach(), low, *stepped_shape(spec, at, high - low)).requires_grad_()
            run = _FlatParam(parameter, low, high, first, last)
            if state is not None:
                run.views = {name: run.of(self.flat[name].data) for name in state.elementwise}
                self.instance.state[parameter] = {**copied_states(state.scalars), **run.views}
            if self.alone:  # the run has it now: its tensors may be large
                self._states[first] = None
            self.runs.append(run)

    def adopt_states(self, names: frozenset[str]) -> None:
        """Copy states that the class has made or replaced into the flat tensors.

        ``names``: the states that are as large as the parameter. For a parameter without dimensions, and for whole
        ones, the shape does not distinguish these from others.
        """
        for run in self.runs:
            state: dict[str, Any] = self.instance.state.get(run.parameter, {})
            run.views = {name: view for name, view in run.views.items() if name in state}  # a class may drop states
            for name, value in state.items():
                if value is run.views.get(name) or not is_elementwise(value, run.parameter):
                    continue
                if (self.alone or run.parameter.dim() == 0) and name not in names:
                    continue  # it only happens to have this shape
                alike = (value.dtype, value.stride()) == (run.parameter.dtype, run.parameter.stride())
                if self.alone and not (may_lie_flat(value) and alike):
                    if self._wide is not None and may_lie_flat(value):
                        self._wide.check_apart(name, value, self.pieces[run.first])
                    run.views.pop(name, None)
                    continue
                view = run.of(self._target(name, value.dtype))
                view.copy_(value)
                state[name] = run.views[name] = view

    def snapshot(self) -> None:
        """Save the state of each piece, and drop the runs."""
        for run in self.runs:
            state = self.instance.state.pop(run.parameter, None)
            if state:
                scalars = {name: value for name, value in state.items() if name not in run.views}
                noted = PieceState(tuple(run.views), scalars)
                self._states[run.first : run.last] = [noted] * (run.last - run.first)
        self.runs, self._key = [], None

    def apply(self, move: Move) -> None:
        """Replace each tensor that is not offloaded by what ``move`` returns for it. Drops the runs."""
        self.snapshot()
        stored = {tensor.untyped_storage().data_ptr() for tensor in self.kept()}

        def moved(tensor: Tensor) -> Tensor:
            return tensor if tensor.untyped_storage().data_ptr() in stored else move(tensor)

        self.master.apply(moved)
        for flat in self.flat.values():
            flat.apply(moved)
        for number, state in enumerate(self._states if self.alone else ()):
            if state is not None:
                self._states[number] = PieceState(state.elementwise, with_tensors(dict(state.scalars), moved))

    def pieces_of(self, slot: int) -> range:
        """Return the numbers of the pieces of a slot in this interval: of its blocks if it is a stack, else one or
        none."""
        first, last = (find(self.pieces, slot, key=lambda piece: piece.slot) for find in _AROUND)
        return range(first, last)

    def state_of(self, piece: int) -> PieceState | None:
        """Return the current state of a piece; None if it has none."""
        place = bisect.bisect_right(self.runs, piece, key=lambda run: run.first) - 1
        if place < 0 or piece >= self.runs[place].last:
            return self._states[piece]
        run = self.runs[place]
        state = self.instance.state.get(run.parameter)
        if not state:
            return None
        scalars = {name: value for name, value in state.items() if name not in run.views}
        return PieceState(tuple(run.views), scalars)

    def own_state(self, piece: int) -> PieceState | None:
        """Return the current state of a piece, whose scalars no other piece has any more; None if it has none.

        They can then be edited in place. At the next step pieces with equal ones form a run again.
        """
        if not self.alone:
            self.snapshot()
        state = self.state_of(piece)
        if state is not None and any(
            self._states[n] is state for n in (piece - 1, piece + 1) if 0 <= n < len(self.pieces)
        ):
            state = self._states[piece] = PieceState(state.elementwise, copied_states(state.scalars))
        return state

    def spans(self) -> Iterator[tuple[int, int, PieceState | None]]:
        """Yield (first piece, last piece + 1, state) of neighbouring pieces that have one state, in order."""
        stepped = {run.first: run.last for run in self.runs}
        first = 0
        while first < len(self.pieces):
            last, state = stepped.get(first, first + 1), self.state_of(first)
            while first not in stepped and last < len(self.pieces) and last not in stepped:
                if self._states[last] is not state:
                    break
                last += 1
            yield first, last, state
            first = last

    def set_state(self, piece: int, state: PieceState | None) -> None:
        """Replace the state of a piece; `snapshot` must have been called."""
        self._states[piece] = state

    def allocate(self, name: str, dtype: torch.dtype) -> FlatBuffer:
        """Return the buffer of a state; allocate it if there is none yet, or one of another dtype."""
        if name not in self.flat or self.flat[name].data.dtype != dtype:
            self.flat[name] = self._room(name, dtype)
        return self.flat[name]

    def _target(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the flat tensor for a state that the class has made, or its copy if the class steps copies now."""
        wide = self._wide if self._wide is not None and self._wide.tensors and dtype in (NARROW, WIDE) else None
        if name not in self.flat:
            self.flat[name] = self._room(name, dtype if wide is None else NARROW)
        if wide is not None and self.flat[name].data.dtype is NARROW:
            return wide.room(name)
        return ({} if self._store is None else self._store.on_device).get(name, self.flat[name].data)

    def _room(self, name: str, dtype: torch.dtype) -> FlatBuffer:
        if self._store is not None:
            room = self._store.tensor(name, dtype)
        else:
            room = torch.zeros(self.end - self.begin, dtype=dtype, device=self.master.device)
        return self.over(room)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the states: flat tensors, scalars of the runs, and master weights."""
        return [*(flat.data for flat in self.flat.values()), *self._others(), *self.master.kept()]

    def stepped(self) -> tuple[bytes, frozenset[int]]:
        """Return the arguments of the last `plan`: which slots of the bucket have runs, one flag each, and the groups
        that are cut. No slot has any after `snapshot`."""
        present, cut = self._key or (b"", frozenset())
        flags = bytearray(len(self.bucket.slots))
        for piece, flag in zip(self.pieces, present, strict=False):
            flags[piece.slot] = flag
        return bytes(flags), cut

    def scalar_bytes(self) -> int:
        """Return the bytes of a run's states of one element; 0 if there are no runs."""
        sizes = (sum(tensor.nbytes for tensor in self._others_of(run) if tensor.numel() <= 1) for run in self.runs)
        return max(sizes, default=0)

    def large_bytes(self) -> int:
        """Return the bytes of the runs' states of more than one element that are not as large as the parameter."""
        return sum(tensor.nbytes for tensor in self._others() if tensor.numel() > 1)

    def _others(self) -> Iterator[Tensor]:
        """Yield the tensors among the states that are not flat."""
        for run in self.runs:
            yield from self._others_of(run)
        for state in self._states if self.alone else ():  # of parameters without a run: those that may be large
            yield from () if state is None else (t for t in tensors_in(dict(state.scalars)) if t.numel() > 1)

    def _others_of(self, run: _FlatParam) -> Iterator[Tensor]:
        states = self.instance.state.get(run.parameter, {})
        return tensors_in({name: value for name, value in states.items() if name not in run.views})

    # -- offloaded states ---------------------------------------------------------------------------------------------

    def kept(self) -> list[Tensor]:
        """Return the tensors that are offloaded."""
        return [] if self._store is None else self._store.tensors()

    def prefetch(self) -> None:
        """Prefetch the states, which will be needed soon."""
        if self._store is not None and not (self.bucket.offloaded and self.master.compared()):
            self._store.prefetch(self._flats())  # else master weights follow edits first

    def ready(self) -> None:
        """Point the class at working copies, if it has some: on the device, or widened to fp32."""
        if not self.runs:
            return
        copies = {} if self._store is None else self._store.ready(self._flats())
        self._point_to(copies if self._wide is None else self._wide.widen(self._narrow()))

    def round(self, steps: Mapping[int, int]) -> None:
        """Round what the class has stepped in fp32 copies. ``steps``: how many were rounded before, by param group."""
        if self._wide is None or not self._wide.tensors:
            return
        kept, done = self._narrow(), 0
        for run in self.runs:
            for number in range(max(run.first, done), run.last):  # parts of a run have the same pieces
                self._wide.round(self.pieces[number], (WEIGHTS, *run.views), kept, steps[self.groups[number]])
            done = run.last
        self._wide.tensors = {}
        self._point_to(kept)

    def evict(self) -> None:
        """Evict the states, which will not be needed for a while. Copies keep their memory until `free_copies`."""
        if self._store is not None:
            flats = self._flats() if self._store.on_device else {}  # the weights of frozen ones need no masters
            self._store.evict(flats)
            self._point_to({name: flats[name] for name in self._store.on_device})

    def free_copies(self) -> None:
        """Release the memory of copies."""
        if self._wide is not None and self._wide.tensors:  # the step failed: nothing is rounded
            self._wide.tensors = {}
            self._point_to(self._narrow())
        if self._store is not None:
            self._store.free_copies()

    def wait_for_copies(self) -> None:
        """Wait until states that were copied back from a device can be read."""
        if self._store is not None:
            self._store.wait_for_copies()

    def _flats(self) -> dict[str, Tensor]:
        weights = {WEIGHTS: self.weights} if self.bucket.offloaded else {}
        return weights | {name: flat.data for name, flat in self.flat.items()}

    def _narrow(self) -> dict[str, Tensor]:
        """Return weights and states as they are kept, on the device that steps them, by name."""
        copies = {} if self._store is None else self._store.on_device
        return {WEIGHTS: self.weights, **self._flats(), **copies}

    def _point_to(self, flats: Mapping[str, Tensor]) -> None:
        """Make the class's states views of these tensors."""
        for run in self.runs if flats else ():
            if WEIGHTS in flats:
                run.parameter.data = run.of(flats[WEIGHTS])
            for name in run.views.keys() & flats.keys():
                view = run.of(flats[name])
                run.views[name] = self.instance.state[run.parameter][name] = view
