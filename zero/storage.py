"""The memory of the parameters: flat tensors, one a bucket, of which the parameters are views.

Knows: the layout and the user's parameters, whose ``data`` it sets. Does not know: gradients, states, ranks' work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from collectives import Transport

from .layout import Layout
from .parameters import bindings, misplaced
from .stages import strided


class ParameterStorage:
    """Parameters in the layout's order, and their memory. Identity, name, shape and strides of a parameter stay."""

    def __init__(self, transport: Transport, module: nn.Module | None) -> None:
        self._transport, self._module = transport, module
        self.layout = Layout((), (), transport.world_size)
        self.parameters: list[Tensor] = []
        self.flats: list[Tensor] = []
        self._bindings = bindings(module)

    def adopt(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        """Take over further parameters, which ``layout`` has in further buckets: their values move there."""
        new = layout.buckets[len(self.flats) :]
        self.layout = layout
        self.parameters += parameters
        for bucket in new:
            flat = self._transport.empty(bucket.numel, bucket.dtypes.compute, torch.device(bucket.device))
            for slot in bucket.slots:
                spec, parameter = layout.parameters[slot.parameter], self.parameters[slot.parameter]
                view = strided(flat, slot.offset, spec.shape, spec.stride)
                view.copy_(parameter.detach())
                parameter.data = view
            self.flats.append(flat)
        self._bindings = bindings(self._module)

    def index(self, parameter: Tensor) -> int:
        """The parameter's place in the layout; `ValueError` for a stranger."""
        for index, known in enumerate(self.parameters):
            if known is parameter:
                return index
        raise ValueError(f"a tensor of shape {tuple(parameter.shape)} is not one of this optimizer's parameters")

    def name(self, parameter: Tensor) -> str:
        return self.layout.parameters[self.index(parameter)].name

    def flat_of(self, index: int) -> Tensor:
        """A parameter's elements in memory order, 1-D."""
        bucket, slot = next((b, s) for b, _, s in self.layout.slots() if s.parameter == index)
        return self.flats[bucket.index][slot.offset : slot.end]

    def elsewhere(self) -> list[Tensor]:
        """The module's other parameters, and its buffers."""
        if self._module is None:
            return []
        listed = {id(p) for p in self.parameters}
        rest = [p.detach() for p in self._module.parameters() if id(p) not in listed]
        return [*rest, *(b.detach() for b in self._module.buffers())]

    def problem(self) -> str | None:
        """What is wrong where a parameter was moved, cast or replaced since; None where all is well."""
        for bucket, _, slot in self.layout.slots():
            parameter, spec = self.parameters[slot.parameter], self.layout.parameters[slot.parameter]
            flat = self.flats[bucket.index]
            place = flat.data_ptr() + slot.offset * flat.element_size()
            if parameter.dtype is not flat.dtype or parameter.device != flat.device:
                return (
                    f"{spec.name!r} is now {parameter.dtype} on {parameter.device}, but was {flat.dtype} on "
                    f"{flat.device} when the optimizer was built: move and cast the model before that"
                )
            if slot.numel and parameter.data_ptr() != place:
                return (
                    f"the memory of {spec.name!r} was replaced after the optimizer was built (by assigning to .data, "
                    "or by moving the model): edit parameters in place"
                )
        return misplaced(self._bindings)

    def release(self) -> None:
        """Give every parameter memory of its own."""
        for index, parameter in enumerate(self.parameters):
            if self._lies_here(index):
                parameter.data = parameter.detach().clone()
        self.flats = []

    def _lies_here(self, index: int) -> bool:
        flat = self.flat_of(index)
        return self.parameters[index].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
