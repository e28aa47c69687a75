"""What each kernel computes, and how tensors become its argument.

Knows: addresses, lengths and dtypes of tensors, the structs of the source. Does not know: how a kernel is compiled
and launched, which a `Launch` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_FILES = ("elements.cu", "elementwise.cu", "norm.cu")
THREADS = 256  # of a block of threads
_PARTS, _SLICES, _CHUNK = 64, 128, 16384  # as in the source
LIMBS = 74  # 72 limbs of 32 bits, and two counters
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}
_SUMS = {out: f"ordered_sum_{name}" for out, name in zip(_TYPES, ("bf16", "fp16", "fp32", "fp64"), strict=True)}
NORM_TYPES = frozenset([torch.bfloat16, torch.float16, torch.float32])  # whose squares are exact in fp64


def source() -> str:
    """Return the source of all kernels, in CUDA C++."""
    return "\n".join(Path(__file__).with_name(name).read_text() for name in _FILES)


class SumArguments(ctypes.Structure):
    """Of the sum in rank order."""

    _fields_ = (
        ("parts", ctypes.c_void_p * _PARTS),
        ("out", ctypes.c_void_p),
        ("length", ctypes.c_longlong),
        ("count", ctypes.c_int),
        ("types", ctypes.c_ubyte * _PARTS),
    )


class SliceArguments(ctypes.Structure):
    """Of the kernels that treat many tensors at once."""

    _fields_ = (
        ("first", ctypes.c_void_p * _SLICES),
        ("second", ctypes.c_void_p * _SLICES),
        ("length", ctypes.c_longlong * _SLICES),
        ("chunks", ctypes.c_int * (_SLICES + 1)),
        ("count", ctypes.c_int),
        ("first_type", ctypes.c_ubyte * _SLICES),
        ("second_type", ctypes.c_ubyte * _SLICES),
        ("extra", ctypes.c_void_p),
    )


class ClipArguments(ctypes.Structure):
    """Of the clip's factor."""

    _fields_ = (("limbs", ctypes.c_void_p), ("out", ctypes.c_void_p), ("max_norm", ctypes.c_float))


class Launch(Protocol):
    """Enqueues a kernel on the device's current stream."""

    def __call__(self, name: str, blocks: int, arguments: ctypes.Structure) -> None:
        """Launch ``blocks`` blocks of `THREADS` threads. ``arguments`` are copied. The host does not wait."""


class DeviceKernels:
    """The kernels of one device. Each call is enqueued on the device's current stream, and the host never waits.

    All tensors are contiguous, on this device, at any address that is a multiple of their element's size, and on the
    current stream, as for an operator. What a call writes has its version raised, as an operator would. Tensors of no
    elements are allowed. None of the calls is known to autograd.
    """

    def __init__(self, launch: Launch, processors: int) -> None:
        """``processors``: multiprocessors of the device, for which the sizes of launches are chosen."""
        self._launch, self._processors = launch, processors

    @staticmethod
    def can_sum(parts: Sequence[Tensor], out: Tensor) -> bool:
        """Return whether `ordered_sum` takes these tensors: on one device, contiguous, bf16, fp16, fp32 or fp64, and
        fp64 only if ``out`` is."""
        return out.dtype in _TYPES and all(
            part.device == out.device
            and part.is_contiguous()
            and part.dtype in _TYPES
            and (part.dtype != torch.float64 or out.dtype == torch.float64)
            for part in (*parts, out)
        )

    def ordered_sum(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Write ``((parts[0] + parts[1]) + parts[2]) + ...`` to ``out``, each sum rounded to ``out``'s dtype.

        The parts are 1-D of ``out``'s length, at least one, each of its own dtype (`can_sum`); one of two dimensions
        stands for its rows. ``out`` may be one of them. One launch adds 64 parts.
        """
        left = list(_rows(parts))
        running = out if len(left) <= _PARTS else torch.empty_like(out)  # a later part may be `out` itself
        while len(left) > _PARTS:
            self._sum(left[:_PARTS], running)
            left = [*_rows([running]), *left[_PARTS:]]
        self._sum(left, out)
        torch.autograd.graph.increment_version(out)

    def _sum(self, rows: Sequence[tuple[int, int]], out: Tensor) -> None:
        """``rows``: the address and the number of the dtype of each."""
        if not out.numel():
            return
        arguments = SumArguments(out=out.data_ptr(), length=out.numel(), count=len(rows))
        arguments.parts[: len(rows)], arguments.types[: len(rows)] = zip(*rows, strict=True)
        blocks = -(-out.numel() // (8 * THREADS))
        self._launch(_SUMS[out.dtype], min(blocks, 32 * self._processors), arguments)

    def norm_limbs(self, tensors: Sequence[Tensor], limbs: Tensor) -> None:
        """Add the exact sum of squares of all elements to ``limbs``.

        Of each tensor 16 elements at a time, from its first, are a block: their squares are added in fp64 in a fixed
        tree, with zeros for elements behind the end. Blocks' sums are added exactly. So a tensor that is cut at
        multiples of 16 elements gives the same as the whole. One launch takes 128 tensors.

        Args:
            tensors: of `NORM_TYPES`.
            limbs: int64, of `LIMBS` elements: the sum is that of ``limbs[k] * 2 ** (32 * k - 1074)`` over all but the
                last two, which count the blocks whose sum is infinite and those whose sum is NaN. All are 0 before the
                first call. Limbs of calls and ranks may be added, elementwise: 2**20 launches cannot overflow them.
        """
        for arguments, chunks in _slices(tensors, None, limbs.data_ptr()):
            self._launch("norm_limbs", min(chunks, 4 * self._processors), arguments)
        torch.autograd.graph.increment_version(limbs)

    def clip_factor(self, limbs: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
        """Return the 2-norm of what `norm_limbs` has added, and min(1, max_norm / (norm + 1e-6)): 0-dim, fp32.

        The sum is rounded to fp64 once, half to even, its root is taken in fp64 and rounded to fp32. The norm is NaN if
        a block was, else inf if a block was. The factor is computed in fp32, the quotient as reciprocal and product.
        """
        out = torch.empty(2, dtype=torch.float32, device=limbs.device)
        self._launch("clip_factor", 1, ClipArguments(limbs.data_ptr(), out.data_ptr(), max_norm))
        return out[0], out[1]

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply each element by ``factor`` (0-dim, fp32, on this device), with one rounding to the tensor's dtype.

        That is torch's product by a number of the host. Tensors are bf16, fp16, fp32 or fp64. One launch takes 128.
        """
        for arguments, chunks in _slices(tensors, None, factor.data_ptr()):
            self._launch("scale", min(chunks, 8 * self._processors), arguments)
        torch.autograd.graph.increment_version(tensors)

    @staticmethod
    def can_follow(master: Tensor, param: Tensor) -> bool:
        """Return whether `follow` takes this pair: on one device, contiguous, fp32 or fp64 beside fp32 or
        16 bits, narrower."""
        return (
            master.device == param.device
            and master.dtype in (torch.float32, torch.float64)
            and param.dtype in NORM_TYPES
            and param.itemsize < master.itemsize
            and master.is_contiguous()
            and param.is_contiguous()
        )

    def follow(self, masters: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Write each element of a parameter, widened, to its master weight if it is not the master weight, rounded.

        Bits are compared; NaN is NaN. Pairs (`can_follow`) are of equal lengths. One launch takes 128.
        """
        for arguments, chunks in _slices(masters, params, None):
            self._launch("follow", min(chunks, 8 * self._processors), arguments)
        torch.autograd.graph.increment_version(masters)


def _rows(parts: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the address of each 1-D part, and of each row of a part of two dimensions, with the number of its dtype."""
    for part in parts:
        begin, number = part.data_ptr(), _TYPES[part.dtype]
        width, count = part.shape[-1] * part.itemsize, part.shape[0] if part.dim() == 2 else 1
        for row in range(count):
            yield begin + row * width, number


def _slices(
    first: Sequence[Tensor], second: Sequence[Tensor] | None, extra: int | None
) -> Iterator[tuple[SliceArguments, int]]:
    """Yield the argument of each launch, and of how many chunks its tensors are."""
    pairs = [pair for pair in zip(first, first if second is None else second, strict=True) if pair[0].numel()]
    for begin in range(0, len(pairs), _SLICES):
        now = pairs[begin : begin + _SLICES]
        chunks = list(accumulate((-(-tensor.numel() // _CHUNK) for tensor, _ in now), initial=0))
        arguments = SliceArguments(count=len(now), extra=extra)
        arguments.first[: len(now)] = [tensor.data_ptr() for tensor, _ in now]
        arguments.second[: len(now)] = [tensor.data_ptr() for _, tensor in now]
        arguments.length[: len(now)] = [tensor.numel() for tensor, _ in now]
        arguments.chunks[: len(now) + 1] = chunks
        arguments.first_type[: len(now)] = [_TYPES[tensor.dtype] for tensor, _ in now]
        arguments.second_type[: len(now)] = [_TYPES[tensor.dtype] for _, tensor in now]
        yield arguments, chunks[-1]
