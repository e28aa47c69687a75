"""Master weights of mixed precision: wide weights for the update, beside the narrow parameters of the model.

Knows: the master weights and the parameters of one interval. Does not know: gradients, ranks, or when a step is.

    master weight (its owner) --- cast ---> parameter --- forward, backward ---> gradient         param_dtype
          ^                                                                         | contribution   reduce_dtype
          +------------ update <--- clip <--- divide <--- sum (its owner) <---------+ ordered sum    accumulate_dtype

Where units are gathered on an accelerator, the owner keeps no parameters beside its master weights: `RoundedShard`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from collectives.kernels import kernels_of

from ..core.bits import INTEGERS, host_readable, same_bits
from ..core.stage import Placement
from .flat_buffer import FlatBuffer

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

    def synced(self) -> Tensor:
        """Return a copy of the master weights as `sync_from_param` would leave them. Changes nothing."""
        if self._master is None:
            return self._param.to(self._dtype)
        copied = MasterWeights(self._param, self._dtype, self._master.clone())
        copied.sync_from_param()
        return copied.master

    def sync_from_param(self) -> None:
        """Take over the elements that were written into the parameters since the last cast."""
        if self._master is None:
            return
        kernels = kernels_of(self._param.device)
        if kernels is not None and kernels.can_follow(self._master, self._param):
            kernels.follow([self._master], [self._param])
            return
        at_once = host_readable(self._param.device)
        block = _BLOCK if at_once else max(1, self._param.numel())
        for begin in range(0, self._param.numel(), block):
            param, master = self._param[begin : begin + block], self._master[begin : begin + block]
            rounded = master.to(param.dtype)
            if at_once and same_bits(rounded, param):
                continue
            as_integers = INTEGERS[param.itemsize]
            written = rounded.view(as_integers) != param.view(as_integers)
            written &= ~(rounded.isnan() & param.isnan())  # a cast makes different NaNs at different places of a tensor
            master.copy_(torch.where(written, param.to(master.dtype), master))

    def forget(self) -> None:
        """Drop the master weights: from now on they are equal to the parameters."""
        self._master = None

    def cast(self, begin: int, end: int) -> None:
        """Round the master weights of elements ``begin`` to ``end`` into the parameters, after an update."""
        self._param[begin:end].copy_(self.master[begin:end])


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
        for written in self._shard.kept():
            MasterWeights(written, followed.dtype, followed).sync_from_param()
        return followed

    def sync_from_param(self) -> None:
        for written in self._shard.kept():
            MasterWeights(written, self._dtype, self._shard.master).sync_from_param()
            self._shard.drop()

    def forget(self) -> None:
        """Make the master weights equal to the parameters."""
        self._shard.master.copy_(self._shard.data)

    def cast(self, begin: int, end: int) -> None:
        """Do nothing: parameters are rounded where they are read."""
