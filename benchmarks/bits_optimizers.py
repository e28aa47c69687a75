"""Does an optimizer's step on pieces and merged runs have the bits of its step on whole parameters?

    plain loop   | a a a a a a a a |    | b b b b b ragged |                each its own memory
    cut          | a a a | a a a a a |  | b | b b b b ragged |              at multiples of 64 bytes
    merged       | a a a | a a a a a b | b b b b ragged |                   neighbours of one rank, as one parameter

Kernels for an accelerator take another loop for a whole tensor where its number of elements is no multiple of 4. So a
merged run takes the loop of its ragged end also for elements that the plain loop steps by the other one.

Equal bits are needed of all but `WITH_OWNERS`, of which they are needed unless the library's trial at construction
notices a difference, and gives each parameter one owner. If torch's own step reads beyond the end of a tensor, that is
told, and nothing is compared.

Knows: classes of torch.optim, cuts. Does not know: buckets, ranks.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero import ZeroOptimizer

from .bits_job import SHORT, Compared, Tally, awkward, first_difference, guarded

GROUP = "optimizers"
Make = type[torch.optim.Optimizer]
CLASSES: dict[str, tuple[Make, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
}
WITH_OWNERS = {("Adam", "fused")}  # on CUDA its pieces may differ, if the library notices
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
        stray = sum(case.reads_beyond(make, options) for case in cases)
    except RuntimeError as error:
        if how != "fused" or "fused" not in str(error):
            raise
        yield Compared(GROUP, f"{name}, {how}", SHORT[dtype], 0, 0, f"torch has none for {device.type}", False)
        return
    if stray:
        told = "torch's step reads beyond the end of a tensor: the plain loop has no bits, either"
        yield Compared(GROUP, f"{name}, {how}, whole", SHORT[dtype], len(cases), stray, told, False)
        return
    for case in cases:
        expected = case.step(make, options, case.whole())
        for layout, bounds in (("cut", case.cut), ("merged", case.merged)):
            found = first_difference(["parameters", "states"], case.step(make, options, bounds()), expected)
            tallies[layout].add(found and f"{case.numel} elements: {found}")
    needed = (name, how) not in WITH_OWNERS or _steps_pieces(make, options, device, dtype)
    for layout, tally in tallies.items():
        yield tally.row(GROUP, f"{name}, {how}, {layout}", SHORT[dtype], needed)


def _steps_pieces(make: Make, options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the library lets this class step pieces. Its trial at construction may find that it must not."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ZeroOptimizer(nn.Linear(8, 9, device=device, dtype=dtype), make, stage=1, **options).close()
    return not any("not element-wise" in str(warning.message) for warning in said)


def _amid_nan(tensor: Tensor) -> Tensor:
    """Return a copy of a 1-D tensor with NaN before and behind it."""
    margin = 4 * CUT_BYTES // tensor.itemsize
    around = tensor.new_full((tensor.numel() + 2 * margin,), torch.nan)
    return around[margin : margin + tensor.numel()].copy_(tensor)


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

    def step(self, make: Make, options: dict[str, Any], bounds: Sequence[int]) -> list[Tensor]:
        """Return the parameters and the states after some steps, flat. The pieces between ``bounds`` are stepped.

        Whole parameters have memory of their own, pieces are views of one flat tensor.
        """
        alone = bounds == self.whole()
        flat = self._start.clone()
        pieces = [flat[low:high] for low, high in itertools.pairwise(bounds)]
        parameters = [(piece.clone() if alone else piece).requires_grad_() for piece in pieces]
        optimizer = make(parameters, **options)
        for gradient in self._gradients:
            for parameter, (low, high) in zip(parameters, itertools.pairwise(bounds), strict=True):
                parameter.grad = gradient[low:high].clone() if alone else gradient[low:high]
            optimizer.step()
        states = [value for parameter in parameters for _, value in _tensors(optimizer, parameter)]
        kinds = len(states) // len(parameters)
        by_name = [torch.cat(states[kind::kinds]) for kind in range(kinds)]
        return [torch.cat([parameter.detach() for parameter in parameters]), torch.cat(by_name)]

    def reads_beyond(self, make: Make, options: dict[str, Any]) -> bool:
        """Return whether a step of a whole parameter reads memory beside its tensors. NaN lies there."""
        parameter = _amid_nan(self._start).requires_grad_()
        optimizer = make([parameter], **options)
        for gradient in self._gradients:
            parameter.grad = _amid_nan(gradient)
            optimizer.step()
            for name, value in _tensors(optimizer, parameter):
                optimizer.state[parameter][name] = _amid_nan(value)
        found = [parameter.detach(), *(value for _, value in _tensors(optimizer, parameter))]
        return any(bool(each.isnan().any()) for each in found)


def _tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """Return the states that are as large as the parameter, by name."""
    states = sorted(optimizer.state[parameter].items())
    return [(name, value) for name, value in states if isinstance(value, Tensor) and value.shape == parameter.shape]
