"""The memory of this process, measured without the help of the optimizer.

Knows: how to find the distinct live storages behind every tensor that Python can reach, and the share of physical
memory that the kernel charges to the process. Does not know: ZeRO. The kinds of storages
(parameters, gradients ...) are given as sets of addresses, and only name storages that were found without them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["bytes_by_kind", "live_storages", "proportional_set_size"]

OTHER = "other"


def live_storages() -> dict[int, int]:
    """Address -> bytes of each distinct CPU or GPU storage behind a live tensor, its `grad` included.

    Storages without memory are left out. Gradients are read from their parameters: a gradient has no Python object
    until `p.grad` is read.
    """
    with torch.DisableTorchFunctionSubclass():
        return dict(entry for tensor in _tensors() if (entry := _storage(tensor)) is not None)


def _tensors() -> Iterator[Tensor]:
    for found in gc.get_objects():
        if issubclass(type(found), Tensor):
            yield found
            if found.is_leaf and found.grad is not None:
                yield found.grad


def _storage(tensor: Tensor) -> tuple[int, int] | None:
    """Address and size of the memory behind a tensor; None for sparse, meta and placeholder tensors."""
    try:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return (storage.data_ptr(), size) if size and tensor.device.type != "meta" else None
    except (RuntimeError, NotImplementedError):
        return None


def bytes_by_kind(live: Mapping[int, int], kinds: Mapping[str, frozenset[int]]) -> dict[str, int]:
    """Bytes of the live storages of each kind, and of those of no kind under "other". No storage counts twice."""
    kind_of = {address: kind for kind in reversed(list(kinds)) for address in kinds[kind]}
    sizes = dict.fromkeys([*kinds, OTHER], 0)
    for address, size in live.items():
        sizes[kind_of.get(address, OTHER)] += size
    return sizes


def proportional_set_size() -> int | None:
    """Bytes of physical memory of this process, where a page shared by n processes counts 1/n; None if unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)
