"""Master weights of mixed precision: wide weights for the update, beside the narrow parameters of the model.

Knows: the master weights and the parameters of one interval. Does not know: gradients, ranks, or when a step is.

    master weight (its owner) --- cast ---> parameter --- forward, backward ---> gradient         param_dtype
          ^                                                                         | contribution   reduce_dtype
          +------------ update <--- clip <--- divide <--- sum (its owner) <---------+ ordered sum    accumulate_dtype

Where units are gathered on an accelerator, the owner keeps no parameters beside its master weights: `RoundedShard`.
With stochastic rounding the owner keeps the parameters alone, and master weights exist during a step: `WideCopies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from collectives.kernels import kernels_of

from ..core.bits import INTEGERS, host_readable, same_bits
from ..core.layout import BucketSpec, ParameterSpec, Piece
from ..core.rounding import NARROW, WEIGHTS, WIDE, RoundedDtypes, StochasticRounding, Stream, round_into
from ..core.stage import Placement
from .flat_buffer import FlatBuffer, Move

_BLOCK = 1 << 16  # elements that stay in the cache while they are compared


class MasterWeights:
    """The weights of one interval in the master's dtype, 1-D, on a rank that updates them.

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
        self._param, self._dtype, self._master, self._empty = param, dtype, master, empty

    @property
    def exists(self) -> bool:
        """False if the weights were never updated: they are equal to the parameters, and use no memory."""
        return self._master is not None

    @property
    def master(self) -> Tensor:
        """The master weights, made from the parameters if they do not exist yet."""
        if self._master is None:
            self._master = self._param.to(self._dtype) if self._empty is None else self._empty().copy_(self._param)
        return self._master

    def apply(self, move: Move) -> None:
        """Replace the tensors by what ``move`` returns for them."""
        self._param = move(self._param)
        self._master = None if self._master is None else move(self._master)

    def synced(self) -> Tensor:
        """Return a copy of the master weights as `sync_from_param` would leave them. Changes nothing."""
        if self._master is None:
            return self._param.to(self._dtype)
        copied = MasterWeights(self._param, self._dtype, self._master.clone())
        copied.sync_from_param()
        return copied.master

    def sync_from_param(self) -> None:
        """Take over the elements that were written into the parameters since the last cast."""
        sync_from_params([self])

    def compared(self) -> list[tuple[Tensor, Tensor]]:
        """Return the master weights and the parameters that they follow; nothing if they are equal to these."""
        return [] if self._master is None else [(self._master, self._param)]

    def followed(self) -> None:
        """Note that the master weights have followed the parameters."""

    def loaded(self) -> None:
        """Note that the master weights were loaded: parameters that are equal to them are kept once."""

    def forget(self) -> None:
        """Drop the master weights: from now on they are equal to the parameters."""
        self._master = None

    def casts(self, begin: int, end: int, stepped: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters ``begin`` to ``end``, and the master weights to round into them after an update.

        ``stepped``: a copy of the master weights that the class has stepped; None: it has stepped these.
        """
        return [(self._param[begin:end], (self.master if stepped is None else stepped)[begin:end])]


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
        """The parameters, to be written: from now on they are kept."""
        if self._written is None:
            with torch.inference_mode(False):  # else it could not be written outside of it later
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

    def forget(self) -> None:
        """Make the master weights equal to the parameters."""
        self._shard.master.copy_(self._shard.data)

    def casts(self, begin: int, end: int, stepped: Tensor | None) -> list[tuple[Tensor, Tensor]]:
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

    @classmethod
    def of(
        cls, rounding: StochasticRounding | None, bucket: BucketSpec, specs: Sequence[ParameterSpec], begin: int
    ) -> WideCopies | None:
        """Return the copies of an interval; None if nothing of it is rounded."""
        if rounding is None or not isinstance(bucket.dtypes, RoundedDtypes):
            return None
        return cls(rounding, bucket, specs, begin)

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
        slot, spec = self._bucket.slots[piece.slot], self._specs[piece.slot]
        place = slice(piece.begin - self._begin, piece.end - self._begin)
        for name in names:
            if name in self.tensors:
                stream = Stream.of(self._rounding.seed, spec.index, name, step)
                first = piece.begin - slot.offset
                round_into(kept[name][place], self.tensors[name][place], stream, first, spec.shape, spec.stride)


def sync_from_params(masters: Sequence[MasterWeights]) -> None:
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
