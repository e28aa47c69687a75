"""The results of the comparisons of bits, and the helpers that all of them use.

Knows: how two tensors are compared, memory at a given address. Does not know: which operations are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.core.bits import as_bytes, same_bits

MODULUS = 1024  # bytes: addresses are counted from a multiple of it
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Compared:
    """How many of some cases have other bits than their reference.

    ``group``: which part of the benchmark. ``what``: the operation. ``first``: the first case that differs, and where;
    or why there is none. ``needed``: the library's promise needs equal bits. ``error``: the comparison raised it.
    """

    group: str
    what: str
    dtype: str
    cases: int
    different: int
    first: str
    needed: bool
    error: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether the library's promise does not hold, or could not be looked at."""
        return self.needed and (self.different > 0 or bool(self.error))


class Tally:
    """Counts the cases of one row, and keeps the first one that differs."""

    def __init__(self) -> None:
        self.cases = self.different = 0
        self.first = ""

    def add(self, difference: str) -> None:
        """Count a case. ``difference``: where it differs; empty if its bits are equal."""
        self.cases += 1
        self.different += bool(difference)
        self.first = self.first or difference

    def row(self, group: str, what: str, dtype: str, needed: bool) -> Compared:
        return Compared(group, what, dtype, self.cases, self.different, self.first, needed)


def guarded(
    group: str, what: str, dtype: str, needed: bool, compare: Callable[[], Iterator[Compared]]
) -> Iterator[Compared]:
    """Yield the rows of a comparison. If it raises, the last row has the error, and the others go on."""
    try:
        yield from compare()
    except (RuntimeError, ValueError) as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        yield Compared(group, what, dtype, 0, 0, "", needed, words[:300])


def difference(name: str, given: Tensor, expected: Tensor) -> str:
    """Return where two tensors of one shape and dtype have other bits, in words; empty if they are equal."""
    given, expected = given.detach().contiguous().view(-1), expected.detach().contiguous().view(-1)
    if given.device != expected.device:
        given, expected = given.cpu(), expected.cpu()
    if same_bits(as_bytes(given), as_bytes(expected)):
        return ""
    unequal = (as_bytes(given) != as_bytes(expected)).view(-1, given.itemsize).any(1)
    index = int(unequal.int().argmax())
    values = f"{given[index].item():.9g} and not {expected[index].item():.9g}"
    return f"{name}: {int(unequal.sum())} of {given.numel()} elements, first at {index}: {values}"


def first_difference(names: Sequence[str], given: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return the first difference between pairs of tensors; empty if there is none."""
    found = (difference(*each) for each in zip(names, given, expected, strict=True))
    return next(filter(None, found), "")


def placed(tensor: Tensor, offset: int) -> Tensor:
    """Return a copy of a tensor whose address is ``offset`` bytes above a multiple of `MODULUS`."""
    memory = torch.empty(tensor.nbytes + 2 * MODULUS, dtype=torch.uint8, device=tensor.device)
    begin = (offset - memory.data_ptr()) % MODULUS
    copy = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    assert (copy.data_ptr() - offset) % MODULUS == 0
    return copy


def awkward(numel: int, dtype: torch.dtype, seed: int, spread: int = 30) -> Tensor:
    """Return numbers on the CPU whose sums are rounded: normal ones, times powers of two from -``spread`` to
    ``spread``. Some are 0.0, -0.0 or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-spread, spread + 1, (numel,), generator=generator)
    values = torch.ldexp(values, exponents).to(dtype)
    tiny = torch.finfo(dtype).tiny
    values[::97], values[1::97], values[2::97] = 0.0, -0.0, tiny / 4
    return values
