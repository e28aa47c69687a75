"""Clipping by the global norm: the factor, the function for a plain loop, and kernels that do both on a device.

With kernels no host reads the norm or the factor:

    norm_limbs     this rank's shards: the exact sum of squares, as integers            each rank
    all-gather     every rank's integers; their sum is exact in any order               all ranks that share a copy
    clip_factor    the norm and the factor, with the bits of `PowerSum` and `clip_factor` on the host
    scale_         all gradients that this rank holds

Knows: gradients of whole parameters or of shards, kernels. Does not know: buckets, what ranks agree on before.
`ZeroOptimizer.clip_grad_norm_` merges the partial norms of the ranks and uses the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport
from collectives.kernels import LIMBS, DeviceKernels

from ..core.norm import PowerSum, check_norm_type
from ..runtime.compiled_calls import untraced


def check_norm_arguments(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Check the arguments of a clip and return both as floats.

    Raises:
        TypeError: `max_norm` is no number.
        ValueError: `norm_type` is not greater than 0 (inf is), or `max_norm` is NaN or negative.
    """
    norm_type = check_norm_type(norm_type)
    try:
        max_norm = float(max_norm)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"max_norm must be a number, not {max_norm!r:.100} (a ZeroOptimizer clips all of its parameters, and "
            "takes none of them)"
        ) from None
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm must be at least 0 (math.inf to measure without clipping), not {max_norm}")
    return max_norm, norm_type


def check_finite(norm: Tensor, norm_type: float) -> None:
    """Raise `RuntimeError` if `norm` (0-dim) is inf or NaN, with the text of torch's `error_if_nonfinite`."""
    if not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of the gradients: min(1, max_norm / (norm + 1e-6)), in `norm`'s dtype, 0-dim.

    The expression is that of `torch.nn.utils.clip_grads_with_norm_`, and so are its bits (torch computes the quotient
    as a reciprocal and a product). NaN stays NaN, and an infinite norm with an infinite `max_norm` gives NaN, as there.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def in_memory_order(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return `gradient`, of `parameter`'s shape, as a 1-D contiguous tensor in the parameter's memory order.

    That is the order of `torch.empty_like(parameter)`, which keeps the strides of dense memory. The result is a view if
    the gradient has that order itself, as those of autograd have, and a copy otherwise.
    """
    if parameter.is_contiguous():
        return gradient.reshape(-1)
    strides = torch.empty_like(parameter, device="meta").stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return gradient.permute(order).reshape(-1)


@untraced
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of a plain loop by their global norm, as `torch.nn.utils.clip_grad_norm_` does.

    The only difference is the norm, which `PowerSum` computes: its bits are the same for any order of ``parameters``,
    and for gradients sharded over ranks. Every gradient is multiplied in place by `clip_factor`, in its own dtype, even
    if the factor is 1 or NaN.

    Args:
        parameters: one or several. Those without a gradient are skipped; one that appears twice counts once.
        max_norm: the largest norm that is not scaled, at least 0; inf to measure without clipping.
        norm_type: p, greater than 0; inf for the largest magnitude.
        error_if_nonfinite: raise instead of scaling by a norm that is inf or NaN.

    Returns:
        The norm before clipping, 0-dim, on the first gradient's device: fp64 if any gradient with elements is, else
        fp32.

    Raises:
        ValueError: `norm_type` is not greater than 0, or `max_norm` is NaN or negative.
        TypeError: a gradient is not fp32, fp64, bf16 or fp16.
        RuntimeError: a gradient is sparse, or `error_if_nonfinite` and the norm is. Nothing has been scaled then.
    """
    max_norm, norm_type = check_norm_arguments(max_norm, norm_type)
    listed = [parameters] if isinstance(parameters, Tensor) else dict.fromkeys(parameters)
    held: list[tuple[Tensor, Tensor]] = []
    for index, parameter in enumerate(listed):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {index}, of shape {tuple(parameter.shape)}, is sparse, and clipping needs "
                "dense gradients: construct the embedding with sparse=False"
            )
        held.append((parameter, gradient))
    with torch.no_grad():
        norm = PowerSum.of((in_memory_order(parameter, gradient) for parameter, gradient in held), norm_type).norm()
        if error_if_nonfinite:
            check_finite(norm, norm_type)
        factor = clip_factor(norm, max_norm)
        for _, gradient in held:
            # A gradient without dimensions would be promoted to the factor's dtype; one of one element is not.
            (gradient.unsqueeze(0) if gradient.dim() == 0 else gradient).mul_(factor)
        return norm.to(held[0][1].device) if held else norm


ON_DEVICE = b"on the device"  # a rank that could clip in this way sends it in its record


def clip_on_device(
    kernels: DeviceKernels,
    device: torch.device,
    shards: Sequence[Tensor],
    gradients: Sequence[Tensor],
    max_norm: float,
    shard_group: Transport,
    collective: Collective,
) -> Tensor:
    """Scale ``gradients`` in place; return their 2-norm before, 0-dim, fp32, on the device. Collective.

    All ranks that share a copy call this. The host does not wait.

    Args:
        kernels: of ``device``, where all tensors are.
        shards: 1-D parts of the gradients, of `NORM_TYPES`. Over these ranks they are every element once, and each
            begins at a multiple of 16 elements from its parameter's start.
        gradients: what this rank scales.
        max_norm: the largest norm that is not scaled.
        shard_group: the ranks that share a copy.
        collective: their all-gather.
    """
    ranks = shard_group.world_size
    limbs = shard_group.scratch(LIMBS * ranks, torch.int64, device)
    kernels.norm_limbs(shards, limbs[LIMBS * shard_group.rank :][:LIMBS].zero_())
    if ranks > 1:
        bounds = list(range(0, LIMBS * (ranks + 1), LIMBS))
        collective.all_gather(limbs, bounds, tag=Tag(Kind.ALL_GATHER, "gradient norm")).wait()
        limbs = limbs.view(ranks, LIMBS).sum(0)
    norm, factor = kernels.clip_factor(limbs, max_norm)
    kernels.scale_(gradients, factor)
    return norm
