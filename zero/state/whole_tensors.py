"""The public calls that give or take whole tensors, which the ranks hold in pieces: `WithWholeTensors`.

Knows: the user's arguments. Does not know: the order of operations in a call, which is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ..parameters.storage import ParameterStorage
from ..runtime.compiled_calls import untraced_methods
from .live_states import LiveStates, WithLiveStates


class _Engine(LiveStates, Protocol):
    def check(self) -> None: ...

    def full_grad(self, *, index: int) -> Tensor | None: ...

    def set_full_grad(self, index: int, gradient: Tensor | None) -> None: ...

    def full_master(self, *, index: int) -> Tensor: ...

    def broadcast_buffers(self) -> None: ...

    def full_state_dict(self, *, to: int | None, masters: bool) -> dict[str, Any] | None: ...

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None: ...


@untraced_methods
class WithWholeTensors(WithLiveStates):
    """An optimizer whose gradients, master weights and parameters can be read and set as whole tensors."""

    _engine: _Engine
    _storage: ParameterStorage

    def full_grad(self, parameter: Tensor) -> Tensor | None:
        """Return a copy of the whole mean gradient of ``parameter``, in its shape, on its device. All ranks.

        Its dtype is the parameter's; with `mixed_precision` it is ``accumulate_dtype``. Returns None if no rank used
        the parameter. Raises `RuntimeError` if a gradient is not reduced yet.
        """
        self._engine.check()
        if parameter in self._storage.replicated:
            return None
        return self._engine.full_grad(index=self._storage.index(parameter))

    def set_full_grad(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Replace the mean gradient of ``parameter``, as ``p.grad = gradient`` does in the plain loop after the
        division. All ranks.

        Every rank gets the values of the first one; the others need a tensor as well. Shape and dtype are those of
        `full_grad`. None: the parameter has no gradient, and a step leaves it alone. Like a clip, the call ends the
        sum: clips and a step may follow, a backward only after `zero_grad`. Raises the same error on every rank if the
        tensor does not fit, if the parameter is frozen, or if some ranks give None.
        """
        self._engine.check()
        if parameter not in self._storage.replicated:
            self._engine.set_full_grad(self._storage.index(parameter), gradient)
        elif gradient is not None:
            name = self._storage.replicated[parameter].name
            raise ValueError(f"set_full_grad of {name!r}: the parameter is frozen and replicated: give None")

    def full_master(self, parameter: Tensor) -> Tensor:
        """Return a copy of the whole master weights of ``parameter``, in its shape. All ranks.

        Without master weights these are the parameter's values, in the master's dtype. For a replicated parameter they
        have the parameter's own dtype.
        """
        self._engine.check()
        if parameter in self._storage.replicated:
            return parameter.detach().clone()
        return self._engine.full_master(index=self._storage.index(parameter))

    def broadcast_buffers(self) -> None:
        """Copy group rank 0's buffers of the module to all ranks, as DDP does before a forward. All ranks.

        Without this call, each rank's buffers (the running statistics of a batch norm) are its own after construction.
        """
        self._engine.broadcast_buffers()

    def full_state_dict(self, to: int | None = 0, *, masters: bool = False) -> dict[str, Any] | None:
        """Return the whole state dict of the module in the host's memory, on group rank ``to``; None elsewhere. All
        ranks.

        With ``to=None`` every rank gets it. Names, ties and hooks are those of ``module.state_dict()``, without what
        `torch.compile` puts into names; buffers are those of the rank that gets the dict. Every tensor is a copy with
        memory of its own. Parameters have the dtype with which the model computes. With ``masters=True`` those that
        have master weights are these, in their dtype. One bucket at a time is whole on the device. Needs the module.
        """
        return self._engine.full_state_dict(to=to, masters=masters)

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Load what `full_state_dict` returned at any stage and number of ranks, or a plain state dict. All ranks.

        The dict of the first rank that gives one is loaded; other ranks may give None. Parameters and buffers become
        its values on every rank; what a module's ``get_extra_state`` returned is not loaded. Where a value is wider
        than the parameter, the parameter is rounded, and the master weights become the value itself; else master
        weights follow as after an edit of the model. Optimizer states and gradients stay as they are. Raises
        `RuntimeError` on every rank if names or shapes are not those of the module, and `ValueError` if no rank gives a
        dict; nothing has changed then.
        """
        self._engine.load_full_state_dict(state_dict)
