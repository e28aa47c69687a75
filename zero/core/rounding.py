"""Stochastic rounding of fp32 to bf16, with random bits that follow from a counter.

Knows: seeds, numbers of parameters, elements and steps. Does not know: ranks, shards, buckets, where a tensor is cut.

    stream      (seed, number of the parameter, weight or name of a state, step) -> key and gamma     BLAKE2b
    word n      mix(key + n * gamma): 64 bits, those of elements 4 n to 4 n + 3                       SplitMix64
    element e   16 bits of word e // 4; e counts the elements of the whole parameter, row by row
    rounded     the upper half of (bits of the fp32 number + these 16 bits)

The sum carries into the upper half with the probability that lies in the lower half: the fraction of the way to the
next number of bf16, away from zero. So the mean of the rounded numbers is the number itself. Torch's integer operators
compute the same bits on every device.

SplitMix64 with a gamma of its own for each stream: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014, figures 16 and 17.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import conflicts
from .bits import host_readable, is_launched, other_stride
from .layout import Dtypes, ParameterSpec

STEPS = "rounding_steps"  # a key of a param group: how many steps were rounded
WEIGHTS = "the weights"  # a key among the names of states; it has a space, which no state's name has
NARROW, WIDE = torch.bfloat16, torch.float32
_BLOCK, _BLOCK_ON_DEVICE = 1 << 16, 1 << 22  # elements that are rounded at once
_PER_WORD = 4
_OUT_OF_RANGE = 0x7F7F0000  # the bits of the largest finite number of bf16: what is not below has no next one
_LARGEST = torch.finfo(torch.bfloat16).max
_INF, _QUIET = 0x7F800000, 0x40  # the bits of inf in fp32; the one that marks a NaN in the upper half
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shifts and factors; a last shift of 31 follows
_FEW_CHANGES = 24  # of neighbouring bits of a gamma, of which SplitMix64 wants more

Options = MutableMapping[str, Any]


class RoundedDtypes(Dtypes):
    """The dtypes of parameters that are kept in 16 bits, and stepped in fp32."""

    @property
    def step_dtype(self) -> torch.dtype:
        return WIDE


def rounded(dtypes: Dtypes) -> Dtypes:
    """Return the dtypes of a bucket whose weights and states are rounded: those in bf16 have no master weights."""
    if dtypes.param_dtype is not NARROW:
        return dtypes
    return RoundedDtypes(NARROW, dtypes.reduce_dtype, dtypes.accumulate_dtype, NARROW)


@dataclass(frozen=True)
class StochasticRounding:
    """Weights and optimizer states in bf16, without fp32 master weights: ``ZeroOptimizer(rounding=...)``.

    The class steps fp32 copies of a parameter and of its states. Then weights and states are rounded to one of the two
    neighbouring bf16 numbers, at random, so that the mean is the fp32 number. The random bits follow from the seed, the
    number of the parameter in the order of the param groups, the tensor (the weight, or the name of the state), the
    element and the step alone. So they do not depend on ranks, stages or buckets, and a run can be repeated.

    A state is rounded if it is as large as its parameter. A number that bf16 has keeps its bits. NaN stays NaN. A
    number beyond the largest one of bf16 is rounded to the nearest, as a cast does. Parameters in fp32 or fp64, such as
    norms of a precision by module, are stepped as ever. fp16 is refused.

    The number of steps is ``rounding_steps`` in each param group, so that state dicts and checkpoints have it. Steps
    that are skipped, by a `GradScaler` for instance, do not count.

    Args:
        seed: of the random bits; any whole number.

    Raises:
        TypeError: the seed is no whole number.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"StochasticRounding: the seed must be a whole number, not {self.seed!r}")

    def round(
        self, values: Tensor, *, parameter: int = 0, step: int = 0, state: str | None = None, begin: int = 0
    ) -> Tensor:
        """Return fp32 ``values`` rounded to bf16, as a step does. Local.

        Args:
            values: a parameter or a state of it, of any shape; or, 1-D, a part of the elements row by row.
            parameter: the number of the parameter in the order of the param groups.
            step: how many steps of its param group were rounded before.
            state: the name of the state; None for the weight.
            begin: the number of the first element of ``values`` in the whole parameter.
        """
        if not isinstance(values, Tensor) or values.dtype is not WIDE:
            raise TypeError(f"StochasticRounding rounds fp32 to bf16, not {getattr(values, 'dtype', type(values))}")
        found = torch.empty(values.shape, dtype=NARROW, device=values.device)
        stream = Stream.of(self.seed, parameter, WEIGHTS if state is None else state, step)
        round_into(found.view(-1), values.detach().contiguous().view(-1), stream, begin)
        return found

    @torch.no_grad()
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Mapping[Tensor, Tensor | None] | None = None,
        among: Iterable[Tensor] | None = None,
    ) -> None:
        """Step a plain optimizer over whole parameters in one process, and round: the plain loop of ``rounding=``.

        It takes the place of ``optimizer.step()``. All fp32 copies exist at once.

        Args:
            optimizer: of any class of torch.optim. ``rounding_steps`` of its param groups go up by one.
            gradients: the mean gradients by parameter, of a loop that adds them up in fp32; a parameter that is missing
                has none. None: they are in ``p.grad``.
            among: all parameters, in the order of the param groups of a `ZeroOptimizer`, if the loop has one optimizer
                for each of several classes. Random bits follow from the number of a parameter there.

        Raises:
            TypeError: a parameter is in fp16, or an argument is of another kind.
            ValueError: every parameter that was used has 0 dimensions, so no shape tells which states are rounded; or
                ``among`` lacks one.
        """
        if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "full_grad"):
            raise TypeError(
                f"StochasticRounding.step is for a plain optimizer, not a {type(optimizer).__name__}: a ZeroOptimizer "
                "with rounding= rounds in its own step()"
            )
        listed = [(p, steps_of(group)) for group in optimizer.param_groups for p in group["params"]]
        numbers = _numbered([p for p, _ in listed], gradients, among)
        copies = [
            _Copies(p, optimizer.state, p.grad if gradients is None else gradients.get(p), numbers[p], count)
            for p, count in listed
        ]
        pairs = zip(listed, copies, strict=True)
        used = [p for (p, _), each in pairs if each.gradient is not None or optimizer.state.get(p)]
        if any(p.dtype is NARROW for p in used) and not any(p.dim() for p in used):
            raise ValueError(
                "StochasticRounding: every parameter that was used has 0 dimensions, so no shape tells which states "
                "are rounded: put them into one optimizer with a larger parameter"
            )
        try:
            for each in copies:
                each.widen()
            optimizer.step()
        except BaseException:
            for each in copies:
                each.put_back()
            raise
        names = _large(listed, optimizer.state)
        for each in copies:
            each.narrow(names, self)
        count_step(optimizer.param_groups)


def _numbered(listed: Sequence[Tensor], gradients: Any, among: Iterable[Tensor] | None) -> dict[Tensor, int]:
    """Return the number of each parameter. Raises if the arguments of `StochasticRounding.step` do not fit them."""
    numbers = {p: number for number, p in enumerate(listed if among is None else among)}
    if any(p not in numbers for p in listed):
        raise ValueError("StochasticRounding: among lacks a parameter of the optimizer: give those of all classes")
    if not isinstance(gradients, Mapping | None) or not all(isinstance(p, Tensor) for p in gradients or ()):
        raise TypeError("StochasticRounding: gradients are a mapping by parameter, and not by name")
    return numbers


class _Copies:
    """A parameter of a plain loop and its states, of which a class steps fp32 copies if they are in bf16."""

    def __init__(self, parameter: Tensor, states: Any, gradient: Tensor | None, number: int, step: int) -> None:
        """``states``: of all parameters; ``number``, ``step``: as in `StochasticRounding.round`."""
        if parameter.dtype is torch.float16:
            raise TypeError(f"StochasticRounding rounds to bf16, and parameter {number} is in fp16")
        self._parameter, self._states, self.gradient = parameter, states, gradient
        self._number, self._step = number, step
        self._shown = parameter.grad
        self._kept: dict[str, Tensor] = {}  # what is in bf16, by name

    def widen(self) -> None:
        """Put fp32 copies in the places of what is in bf16. A parameter without a gradient stays as it is."""
        parameter = self._parameter
        parameter.grad = None
        if self.gradient is None:
            return
        if parameter.dtype is NARROW:
            large = _states_like(parameter, self._states.get(parameter, {}), NARROW)
            self._kept = {WEIGHTS: parameter.data, **large}
            self._put({name: tensor.to(WIDE) for name, tensor in self._kept.items()})
        parameter.grad = self.gradient.to(parameter.dtype)

    def put_back(self) -> None:
        """Put the tensors in bf16 back."""
        self._parameter.grad = None
        self._put(self._kept)
        self._parameter.grad = self._shown

    def narrow(self, names: set[str], rounding: StochasticRounding) -> None:
        """Round the copies, and put the rounded tensors in their places. ``names``: of the states that are rounded."""
        if self._kept:
            states = self._states.get(self._parameter, {})
            large = _states_like(self._parameter, states, WIDE)
            stays = {WEIGHTS, *(large.keys() & names)}
            self._kept = {name: kept for name, kept in self._kept.items() if name in stays}
            self._kept |= _states_like(self._parameter, states, NARROW)  # which the class has made anew
            wide = {name: values for name, values in large.items() if name in names}
            for name, values in {WEIGHTS: self._parameter.data, **wide}.items():
                state = None if name == WEIGHTS else name
                found = rounding.round(values, parameter=self._number, step=self._step, state=state)
                self._kept.setdefault(name, torch.empty_like(values, dtype=NARROW)).copy_(found)
        self.put_back()

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name == WEIGHTS:
                self._parameter.data = tensor
            else:
                self._states[self._parameter][name] = tensor


def _states_like(parameter: Tensor, states: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the states of a parameter that have its shape and a dtype, and are plain tensors."""
    plain = ((name, value) for name, value in states.items() if type(value) in (Tensor, torch.nn.Parameter))
    return {name: value for name, value in plain if value.shape == parameter.shape and value.dtype is dtype}


def _large(listed: Iterable[tuple[Tensor, int]], states: Any) -> set[str]:
    """Return the names of the states that are as large as their parameter, for each one that has a dimension."""
    pairs = [
        (name, isinstance(value, Tensor) and value.shape == parameter.shape)
        for parameter, _ in listed
        if parameter.dim()
        for name, value in states.get(parameter, {}).items()
    ]
    return {name for name, _ in pairs} - {name for name, large in pairs if not large}


def steps_of(group: Mapping[str, Any]) -> int:
    """Return how many steps of a param group were rounded."""
    return int(group.get(STEPS, 0))


def count_step(groups: Sequence[Options]) -> None:
    """Count a step that was rounded."""
    for group in groups:
        group[STEPS] = steps_of(group) + 1


def check_rounded(
    specs: Sequence[ParameterSpec], requested: Iterable[str | None], with_modes: Iterable[str], *, first: bool
) -> None:
    """Raise `ValueError` if parameters cannot be rounded.

    Args:
        specs: of the parameters of new param groups.
        requested: the partitions that these groups ask for.
        with_modes: names of the classes that have `train` and `eval`.
        first: whether these are all param groups, of which one must have a parameter in bf16.
    """
    in_fp16 = [spec.name for spec in specs if spec.dtypes.param_dtype is torch.float16]  # a frozen one may be trained
    if in_fp16:
        raise ValueError(
            f"rounding: {in_fp16[0]!r} is in fp16, and rounding is to bf16 alone: make the model in bf16, "
            "or leave out rounding= and take mixed_precision=, which keeps fp32 masters"
        )
    if first and not any(spec.trainable and spec.dtypes.param_dtype is NARROW for spec in specs):
        raise ValueError(
            "rounding: no parameter is in bf16, so there is nothing to round: call model.bfloat16() first, or pass "
            "mixed_precision=zero.MixedPrecision(torch.bfloat16)"
        )
    if "block" in requested:
        raise ValueError(conflicts.IN_BITS.text())
    for spec in specs:
        if spec.grain.stack:
            raise ValueError(conflicts.BLOCKS.text(name=spec.name))
    for name in with_modes:
        raise ValueError(conflicts.MODES.text(name=name))


@dataclass(frozen=True)
class Stream:
    """The random bits of one tensor in one step. ``key``, ``gamma``: as signed numbers of 64 bits."""

    key: int
    gamma: int

    @classmethod
    def of(cls, seed: int, parameter: int, name: str, step: int) -> Stream:
        """Return the stream of a tensor, by its name, of a parameter, by its number, in a step."""
        digest = hashlib.blake2b(f"{seed},{parameter},{step},{name}".encode(), digest_size=16).digest()
        key, gamma = (int.from_bytes(half, "little") for half in (digest[:8], digest[8:]))
        gamma |= 1
        if (gamma ^ gamma >> 1).bit_count() < _FEW_CHANGES:
            gamma ^= 0xAAAAAAAAAAAAAAAA
        return cls(_signed(key), _signed(gamma))

    def bits(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Return the 16 random bits of each element of ``[begin, end)``, as int32 from 0 on."""
        first = begin // _PER_WORD
        words = self._words(torch.arange(first, -(-end // _PER_WORD), device=device))
        skipped = begin - _PER_WORD * first
        return words.view(torch.int16)[skipped : skipped + end - begin].to(torch.int32).bitwise_and_(0xFFFF)

    def bits_at(self, elements: Tensor) -> Tensor:
        """Return the 16 random bits of each of the ``elements``, which are int64 and contiguous."""
        words = self._words(torch.div(elements, _PER_WORD, rounding_mode="floor"))
        shifts = torch.remainder(elements, _PER_WORD).mul_(16)
        return words.bitwise_right_shift_(shifts).bitwise_and_(0xFFFF).to(torch.int32)

    def _words(self, numbers: Tensor) -> Tensor:
        """Return the 64 bits of each word, given by its number, in the memory of the numbers."""
        numbers.mul_(self.gamma).add_(self.key)
        for shift, factor in _MIXING:
            _xor_shifted(numbers, shift).mul_(_signed(factor))
        return _xor_shifted(numbers, 31)


def _xor_shifted(numbers: Tensor, shift: int) -> Tensor:
    """Combine int64 numbers with themselves, shifted to the right with zeros from the left. In place."""
    return numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << 64 - shift) - 1))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def round_into(
    target: Tensor,
    values: Tensor,
    stream: Stream,
    begin: int,
    shape: Sequence[int] = (),
    stride: Sequence[int] = (),
) -> None:
    """Round fp32 ``values`` into ``target``, which is in bf16. Both are 1-D.

    Args:
        target: the result.
        values: elements of a parameter, side by side in its memory.
        stream: of the tensor.
        begin: the number of the first one in the parameter's memory.
        shape: of the parameter, and its ``stride``, which is dense, if it is not row-major.
    """
    turned = other_stride(shape, stride) is not None
    size = _BLOCK_ON_DEVICE if is_launched(values.device) else _BLOCK
    for low in range(0, values.numel(), size):
        part = values[low : low + size]
        first, last = begin + low, begin + low + len(part)
        if turned:
            bits = stream.bits_at(_row_major(torch.arange(first, last, device=values.device), shape, stride))
        else:
            bits = stream.bits(first, last, values.device)
        target[low : low + size].copy_(_rounded(part, bits))


def _rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return fp32 ``values`` rounded to bf16 by 16 random bits each, whose memory is used."""
    raw = values.view(torch.int32)
    in_range = host_readable(values.device) and _is_in_range(values)
    magnitude = raw if in_range else raw & 0x7FFFFFFF
    if not in_range:  # to the nearest: a carry from the half on; inf has no lower bits
        bits.masked_fill_(magnitude >= _OUT_OF_RANGE, 0x8000)
    upper = bits.add_(raw).bitwise_right_shift_(16)
    if not in_range:
        upper = torch.where(magnitude > _INF, (raw >> 16) | _QUIET, upper)
    return upper.to(torch.int16).view(NARROW)


def _is_in_range(values: Tensor) -> bool:
    """Return whether all values on the CPU are below the largest one of bf16. None is NaN then."""
    low, high = (float(each) for each in torch.aminmax(values))
    return low > -_LARGEST and high < _LARGEST


def _row_major(places: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the row-major numbers of elements of a parameter, given their places in its memory."""
    found, inner = torch.zeros_like(places), 1
    for size, apart in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1:
            found += torch.div(places, apart, rounding_mode="floor").remainder_(size).mul_(inner)
        inner *= size
    return found
