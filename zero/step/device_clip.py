"""Clipping by kernels that form the exact norm and the factor on the device, so that no host reads them.

    norm_limbs     this rank's shards: the exact sum of squares, as integers            each rank
    all-gather     every rank's integers; their sum is exact in any order               all ranks that share a copy
    clip_factor    the norm and the factor, with the bits of `PowerSum` and `clip_factor` on the host
    scale_         all gradients that this rank holds

Knows: tensors, kernels, the ranks that share one copy. Does not know: buckets, what the ranks agree on before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport
from collectives.kernels import LIMBS, DeviceKernels

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
