"""Master weights of mixed precision: wide weights for the update, beside the narrow parameters of the model.

Knows: the master weights and the parameters of one interval. Does not know: gradients, ranks, or when a step is.

    master weight (its owner) --- cast ---> parameter --- forward, backward ---> gradient         param_dtype
          ^                                                                         | contribution   reduce_dtype
          +------------ update <--- clip <--- divide <--- sum (its owner) <---------+ ordered sum    accumulate_dtype
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.bits import INTEGERS, host_readable, same_bits

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

    def cast(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the parameters ``begin`` to ``end``, and the master weights to round into them after an update."""
        return self._param[begin:end], self.master[begin:end]
