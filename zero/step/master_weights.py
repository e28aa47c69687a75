"""Mixed precision: narrow numbers to compute with and to send, wide ones to add up in and to update.

Knows: the wide weights beside the narrow ones. Does not know: gradients, ranks, or when a step is.

    master weight (its owner) --- cast ---> parameter --- forward, backward ---> gradient         param_dtype
          ^                                                                         | contribution   reduce_dtype
          +------------ update <--- clip <--- divide <--- sum (its owner) <---------+ fold           accumulate_dtype
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.bits import INTEGERS, host_readable, same_bits

_BLOCK = 1 << 16  # elements that stay in the cache while they are compared


class MasterWeights:
    """The weights of one interval in the master's dtype, on a rank that updates them, 1-D; the model computes with the
    interval itself.

    They follow the model: an element that is not its master weight, rounded, was written from outside (an edit, a
    loaded checkpoint), and is the weight from then on.
    """

    def __init__(
        self, param: Tensor, dtype: torch.dtype, master: Tensor | None, empty: Callable[[], Tensor] | None = None
    ) -> None:
        """``param``: the interval; ``master``: its values, where they are known better than from it; ``empty``: the
        memory that they are kept in, each time the same, if that is not to be had anywhere."""
        self._param, self._dtype, self._master, self._empty = param, dtype, master, empty

    @property
    def exists(self) -> bool:
        """False of weights that were never updated: then the narrow ones say it all, and no memory is used."""
        return self._master is not None

    @property
    def master(self) -> Tensor:
        """The weights, made from the narrow ones where there are none yet."""
        if self._master is None:
            self._master = self._param.to(self._dtype) if self._empty is None else self._empty().copy_(self._param)
        return self._master

    def synced(self) -> Tensor:
        """What `sync_from_param` would make of them, a copy."""
        if self._master is None:
            return self._param.to(self._dtype)
        copied = MasterWeights(self._param, self._dtype, self._master.clone())
        copied.sync_from_param()
        return copied.master

    def sync_from_param(self) -> None:
        """Take over what was written into the narrow ones."""
        if self._master is None:
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
            written &= ~(rounded.isnan() & param.isnan())  # which NaN a cast makes depends on the place in a tensor
            master.copy_(torch.where(written, param.to(master.dtype), master))

    def forget(self) -> None:
        """From now on the narrow ones say it all."""
        self._master = None

    def cast(self, begin: int, end: int) -> None:
        """Round these weights, which were updated, to what the model computes with."""
        self._param[begin:end].copy_(self.master[begin:end])
