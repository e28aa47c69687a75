"""Whether an optimizer class is element-wise, so that pieces of a parameter are stepped as the whole would be.

Knows: `torch.optim` classes, and how one is tried. Does not know: buckets, ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .runs import Options, is_elementwise


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The class's own ``step``, without the hooks that torch wraps around it: these belong to the user's object."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)


def check_elementwise(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Options,
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
) -> frozenset[str]:
    """Raise `ValueError` unless two steps over 96 elements as one tensor give the bits of two pieces stepped by two
    instances. Costs two small steps; leaves the random generator alone. Returns the names of the states that are as
    large as the parameter."""
    cut, size = 32, 96
    with torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(size, generator=generator, device="cpu").to(dtype=dtype, device=device)
        gradients = [
            torch.randn(size, generator=generator, device="cpu").to(dtype=dtype, device=device) for _ in range(2)
        ]
        try:
            whole, names = _two_steps(optimizer_class, arguments, options, values, gradients, 0, size)
            parts = [
                _two_steps(optimizer_class, arguments, options, values, gradients, low, high)[0]
                for low, high in ((0, cut), (cut, size))
            ]
        except Exception as error:
            raise not_elementwise(optimizer_class, f"two steps on a flat tensor failed ({error})") from error
    if not torch.equal(whole.view(torch.uint8), torch.cat(parts).view(torch.uint8)):
        raise not_elementwise(optimizer_class, "a tensor stepped in two pieces gave other values than stepped whole")
    return names


def _two_steps(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Options,
    options: Options,
    values: Tensor,
    gradients: Sequence[Tensor],
    low: int,
    high: int,
) -> tuple[Tensor, frozenset[str]]:
    parameter = values[low:high].clone().requires_grad_()
    optimizer = optimizer_class([{**copy.deepcopy(options), "params": [parameter]}], **copy.deepcopy(arguments))
    for gradient in gradients:
        parameter.grad = gradient[low:high].clone()
        unhooked_step(optimizer)()
    names = set()
    for name, value in optimizer.state[parameter].items():
        if is_elementwise(value, parameter):
            names.add(name)
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"its state {name!r} has shape {tuple(value.shape)}, not the parameter's")
    return parameter.detach(), frozenset(names)


def not_elementwise(optimizer_class: type, why: str) -> ValueError:
    """What to raise where a class cannot be sharded."""
    return ValueError(
        f"{optimizer_class.__name__} is not element-wise: {why}. A rank steps flat pieces of parameters, so only "
        "classes whose update of an element depends on nothing but that element's gradient and state can be sharded "
        "(SGD, Adam, AdamW, Adagrad, RMSprop, ...)"
    )
