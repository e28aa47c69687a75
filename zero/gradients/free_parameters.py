"""Whether parameters may be taken over by a new optimizer, or into a further param group.

Knows: the owners of parameters, and p.grad. Does not know: buckets, ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.parameter_specs import HELD_ELSEWHERE
from .hooks import owners_of
from .placeholder import ShardedGradient


def check_free(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` if a parameter has an exclusive owner; the error names the parameter."""
    for name, parameter in parameters:
        if any(owner.exclusive for owner in owners_of(parameter)):
            raise ValueError(HELD_ELSEWHERE.format(what=repr(name)))


def check_no_gradients(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` if a parameter of a further group has a gradient; the error names the parameter."""
    for name, parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter.grad, ShardedGradient):
            raise ValueError(
                f"add_param_group: {name!r} has a gradient already, of a backward that the optimizer has not seen: set "
                "p.grad = None, or add the group before that backward"
            )
