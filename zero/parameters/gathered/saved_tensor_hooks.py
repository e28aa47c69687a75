"""Saved-tensor hooks: a graph keeps a `PackedParam` of a unit's parameter instead of its memory.

Knows: autograd's hooks for saved tensors. Does not know: when a unit runs, or where its memory is.

    pack     a tensor in a gathered buffer    -> a PackedParam
             any other                        -> the result of the hooks pushed before, or the tensor itself
    unpack   a PackedParam                    -> gather and install the unit, then a view of its buffer

Autograd checks the tensors that it saves itself for edits in place, but not those that a hook keeps. These are checked
here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from collectives.torch_internals import top_saved_tensors_hooks

from ...runtime.compiled_calls import untraced
from .saved_tensor_index import PackedParam, SavedTensorIndex

_Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Any]]


class SavedTensorHooks:
    """The hooks of one optimizer. ``needed`` is called with a unit before a tensor of it is restored. torch has one
    stack of saved-tensor hooks per thread."""

    def __init__(self, index: SavedTensorIndex, needed: Callable[[int], None]) -> None:
        self._home = index.home
        self._index, self._needed = weakref.ref(index), weakref.WeakMethod(needed)
        self._alone = saved_tensors_hooks(*self._hooks(None))  # without others below, as almost always

    def push(self) -> bool:
        """Push these hooks on this thread's stack. Return True if the caller must `pop` them; False if they are on top
        already."""
        before = top_saved_tensors_hooks(False)
        if before is not None and self._are_ours(before[0]):
            return False
        (self._alone if before is None else saved_tensors_hooks(*self._hooks(before))).__enter__()
        return True

    def _are_ours(self, pack: Any) -> bool:
        defaults = getattr(pack, "__defaults__", None)
        return defaults is not None and len(defaults) == 1 and defaults[0] is self._home

    def pop(self) -> None:
        self._alone.__exit__()  # pops the hooks that were pushed last, whichever they are

    def _hooks(self, before: _Pair | None) -> _Pair:
        known, needed, home = self._index, self._needed, self._home  # weakly: a graph may outlive the optimizer

        @untraced
        def pack(tensor: Tensor, _owner: object = home) -> Any:  # the default identifies the function in `push`
            index = known()
            if index is not None and (saved := index.find(tensor)) is not None:
                return saved
            if before is not None:
                return before[0](tensor)
            kept = tensor.detach()  # not itself: an output that its own graph holds would never be freed
            return kept, kept._version

        @untraced
        def unpack(kept: Any) -> Any:
            if isinstance(kept, PackedParam) and kept.place.home is home:
                index, need = known(), needed()
                if index is None or need is None:
                    raise RuntimeError("this graph belongs to an optimizer that is gone: its parameters are, too")
                need(kept.place.unit)
                return index.restore(kept)
            if before is not None:
                return before[1](kept)
            tensor, version = kept
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} "
                    "instead"
                )
            return tensor

        return pack, unpack
