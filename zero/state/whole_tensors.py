"""The public calls that give or take whole tensors, which the ranks hold in pieces: `WithWholeTensors`.

Knows: the user's arguments. Does not know: the order of operations in a call, which is the engine's.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..parameters.storage import ParameterStorage
from ..runtime.compiled_calls import untraced_methods
from .live_states import LiveStates, WithLiveStates


class _Engine(LiveStates, Protocol):
    def check(self) -> None: ...

    def full_grad(self, *, index: int) -> Tensor | None: ...

    def full_master(self, *, index: int) -> Tensor: ...


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

    def full_master(self, parameter: Tensor) -> Tensor:
        """Return a copy of the whole master weights of ``parameter``, in its shape. All ranks.

        Without master weights these are the parameter's values, in the master's dtype. For a replicated parameter they
        have the parameter's own dtype.
        """
        self._engine.check()
        if parameter in self._storage.replicated:
            return parameter.detach().clone()
        return self._engine.full_master(index=self._storage.index(parameter))
