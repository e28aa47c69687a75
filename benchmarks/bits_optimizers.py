"""Does an optimizer's step on pieces and merged runs have the bits of its step on whole parameters?

    plain loop   | a a a a a a a a |    | b b b b b ragged |                each its own memory
    cut          | a a a | a a a a a |  | b | b b b b ragged |              at multiples of 64 bytes
    merged       | a a a | a a a a a b | b b b b ragged |                   neighbours of one rank, as one parameter

Kernels for an accelerator take another loop for a whole tensor where its number of elements is no multiple of 4. So a
merged run takes the loop of its ragged end also for elements that the plain loop steps by the other one.

If torch's own step of whole parameters reads memory that it has not written, that is told, and nothing is compared.

Knows: classes of torch.optim, cuts. Does not know: buckets, ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .bits_job import SHORT, Compared, Tally, awkward, first_difference, guarded

GROUP = "optimizers"
CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
}
IMPLEMENTATIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
DTYPES = (torch.float32, torch.bfloat16)
CUT_BYTES = 64
STEPS = 3
LENGTHS, QUICK_LENGTHS = (65536 + 64, 2 * 65536 + 96), (1024 + 64, 2048 + 96)  # beyond a kernel's chunk of 65536


def compare(device: torch.device, quick: bool) -> Iterator[Compared]:
    """Yield a row for each dtype, class, implementation and layout."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    for dtype, name, how in itertools.product(DTYPES, CLASSES, IMPLEMENTATIONS):
        compare_class = partial(_of_class, device, dtype, name, how, lengths)
        yield from guarded(GROUP, f"{name}, {how}", SHORT[dtype], True, compare_class)


def _of_class(
    device: torch.device, dtype: torch.dtype, name: str, how: str, lengths: Sequence[int]
) -> Iterator[Compared]:
    make, arguments = CLASSES[name]
    options = arguments | IMPLEMENTATIONS[how]
    tallies = {layout: Tally() for layout in ("cut", "merged")}
    cases = [_Case(device, dtype, lengths[0], lengths[1] + ragged) for ragged in range(4)]
    try:
        with _unwritten_memory_is_nan():
            filled = [torch.cat(case.step(make, options, case.whole())) for case in cases]
    except RuntimeError as error:
        if how != "fused" or "fused" not in str(error):
            raise
        yield Compared(GROUP, f"{name}, {how}", SHORT[dtype], 0, 0, f"torch has none for {device.type}", False)
        return
    broken = sum(bool(each.isnan().any()) for each in filled)
    if broken:
        told = "torch's step reads memory that it has not written: the plain loop has no bits, either"
        yield Compared(GROUP, f"{name}, {how}, whole", SHORT[dtype], len(cases), broken, told, False)
        return
    for case in cases:
        expected = case.step(make, options, case.whole())
        for layout, bounds in (("cut", case.cut), ("merged", case.merged)):
            found = first_difference(["parameters", "states"], case.step(make, options, bounds()), expected)
            tallies[layout].add(found and f"{case.numel} elements: {found}")
    for layout, tally in tallies.items():
        yield tally.row(GROUP, f"{name}, {how}, {layout}", SHORT[dtype], True)


@contextmanager
def _unwritten_memory_is_nan() -> Iterator[None]:
    """Let torch fill memory that it allocates without values with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Case:
    """Two parameters side by side, and their gradients of some steps."""

    def __init__(self, device: torch.device, dtype: torch.dtype, first: int, second: int) -> None:
        self._grain = CUT_BYTES // dtype.itemsize
        assert first % self._grain == 0, "nothing lies between the two parameters"
        self._first, self.numel = first, first + second
        self._start = awkward(self.numel, dtype, 0, 4).to(device)
        self._gradients = [awkward(self.numel, dtype, seed, 12).to(device) for seed in range(1, STEPS + 1)]

    def whole(self) -> list[int]:
        """Return the bounds of the parameters, as the plain loop has them."""
        return [0, self._first, self.numel]

    def cut(self) -> list[int]:
        """Return the bounds of pieces. Each parameter is cut, at multiples of 64 bytes."""
        return [0, self._grain, self._first // 2 // self._grain * self._grain, self._first, *self._of_second()]

    def merged(self) -> list[int]:
        """Return the bounds of runs, one of which has elements of both parameters."""
        return [0, self._grain * 3, self._first + self._grain * 5, self.numel]

    def _of_second(self) -> list[int]:
        return [self._first + self._grain * 7, self.numel]

    def step(
        self, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], bounds: Sequence[int]
    ) -> list[Tensor]:
        """Return the parameters and the states after some steps, flat. The pieces between ``bounds`` are stepped.

        Whole parameters have memory of their own, pieces are views of one flat tensor.
        """
        alone = len(bounds) == 3
        flat = self._start.clone()
        pieces = [flat[low:high] for low, high in itertools.pairwise(bounds)]
        parameters = [(piece.clone() if alone else piece).requires_grad_() for piece in pieces]
        optimizer = make(parameters, **options)
        for gradient in self._gradients:
            for parameter, (low, high) in zip(parameters, itertools.pairwise(bounds), strict=True):
                parameter.grad = gradient[low:high].clone() if alone else gradient[low:high]
            optimizer.step()
        states = [
            value
            for parameter in parameters
            for _, value in sorted(optimizer.state[parameter].items())
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]
        kinds = len(states) // len(parameters)
        by_name = [torch.cat(states[kind::kinds]) for kind in range(kinds)]
        return [torch.cat([parameter.detach() for parameter in parameters]), torch.cat(by_name)]
