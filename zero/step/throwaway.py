"""Throw-away parameters for the trial of a class: stepped whole by the class itself, and as ranks step them.

Knows: the shapes and values of these parameters, their gradients, and how ranks lay them out. Does not know: the
options that are tried, and the comparison of results.

    whole     [ 1-D ] [ 2-D       ] [ 4-D    ] [ scalar ]      stepped by the class itself, as in a plain loop
    half 0    [ 1-D 2-D... 4-D.. ]                             stepped by `UserOptimizer`, as on a rank: neighbouring
    half 1    [ 1-D 2-D.... ] [ 4-D.. ] [ scalar ]             pieces form a run, up to one with padding after it
    alone     [ 1-D ] [ 2-D       ] [ 4-D    ] [ scalar ]      stepped by `UserOptimizer`, each as by its owner
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from ..core.grain import BY_BLOCK, CUT_EVERY, Grain
from ..core.layout import BucketSpec, Dtypes, EvenCuts, ParameterSpec, Slot
from ..core.runs import is_elementwise
from ..core.stage import Placement
from ..runtime.flat_buffer import FlatBuffer
from ..runtime.flat_states import BucketStates, Options
from .user_optimizer import BucketUpdate, Call, UserOptimizer, all_present, unhooked_step

# With AVX-512 torch computes `sigmoid` and `pow` of 128 bytes at once, and of a rest of fewer in another way. Ranks cut
# at multiples of 64 bytes. Throw-away tensors of so many times 64 bytes have such a rest if they are stepped whole, and
# hardly any in pieces, which lie side by side without padding.
RAGGED = (1, 3, 5, 7, 9, 11, 13, 15)
# Torch's kernels for lists of tensors on CUDA take another loop if a length is no multiple of 4 (kILP in
# MultiTensorApply.cuh). Throw-away tensors of so many elements are stepped whole in it, and a half of them is not.
RAGGED_ON_DEVICE = 97
LARGE = 1 << 12  # elements from which on a class may keep its states in 8 bits or fewer
SMALL = 16  # longer sides are shortened: the classes for which this is tried take time with the cube of a side


@dataclass(frozen=True)
class Setting:
    """A kind of the user's parameters that is tried: equal options, dtypes and device."""

    options: int  # index among the distinct options
    dtypes: Dtypes
    device: torch.device
    shapes: tuple[tuple[int, ...], ...]  # of these parameters

    @property
    def matrices(self) -> bool:
        """Whether some have two dimensions or more."""
        return any(len(shape) > 1 for shape in self.shapes)


Placed = tuple[Setting, tuple[int, ...]]  # a throw-away parameter: its kind and its shape


class ClassFailedError(Exception):
    """The class itself raised an error over whole parameters."""


class FullParameters:
    """Throw-away parameters, stepped by the class. Raises `ClassFailedError` if the class refuses them."""

    def __init__(self, inner: UserOptimizer, options: Sequence[Options], shapes: Sequence[Placed]) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.draws = False  # whether a step has drawn random numbers
        self._shapes = list(dict.fromkeys(shape for _, shape in shapes))
        self._sizes = [self._noise(shape) for shape in self._shapes]  # magnitudes of the elements' gradients
        values = {shape: self._noise(shape) ** 5 for shape in self._shapes}  # of many magnitudes
        self.settings = [setting for setting, _ in shapes]
        self.parameters = [
            values[shape].to(setting.device, setting.dtypes.step_dtype, copy=True).requires_grad_()
            for setting, shape in shapes
        ]
        groups: list[Options] = [{**copy.deepcopy(group), "params": []} for group in options]
        for setting, parameter in zip(self.settings, self.parameters, strict=True):
            groups[setting.options]["params"].append(parameter)
        try:
            self._optimizer = inner.plain(groups)
        except Exception as error:
            raise ClassFailedError(str(error)) from error
        if inner.has_modes:
            self.call(methodcaller("train"))

    def _noise(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device="cpu")

    @property
    def groups(self) -> list[Options]:
        """The options of each group, as the class has left them."""
        return [{key: group[key] for key in group if key != "params"} for group in self._optimizer.param_groups]

    def gradients(self, step: int) -> list[Tensor]:
        """Return the gradients of a step.

        Their scales vary, some elements are zero, and in every third step all gradients are orthogonal to their
        parameters, row by row.
        """
        scale = (1.0, 0.3, 1.0, 3.0, 1.0, 0.1, 1.0, 30.0)[step % 8]
        noise = {
            shape: nn.functional.hardshrink(scale * size * self._noise(shape), 0.01)
            for size, shape in zip(self._sizes, self._shapes, strict=True)
        }
        found = [noise[tuple(p.shape)].to(p.device) for p in self.parameters]
        if step % 3 == 1:
            found = [_orthogonal(gradient, p.detach()) for gradient, p in zip(found, self.parameters, strict=True)]
        return [gradient.to(p.dtype) for gradient, p in zip(found, self.parameters, strict=True)]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Step all parameters once. Raises `ClassFailedError` if the class raises."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        before = torch.get_rng_state()
        self.call(unhooked_step)
        self.draws = self.draws or not torch.equal(before, torch.get_rng_state())

    def call(self, call: Call) -> None:
        """Call a method of the class. Raises `ClassFailedError` if it raises."""
        try:
            call(self._optimizer)
        except Exception as error:
            raise ClassFailedError(str(error)) from error

    def state(self, parameter: int) -> Mapping[str, Any]:
        """Return the class's state of a parameter."""
        state: dict[str, Any] = self._optimizer.state[self.parameters[parameter]]
        return state

    def odd_key(self) -> str:
        """Return words about a key of the class's states that is no parameter; empty if there is none."""
        odd = next((key for key in self._optimizer.state if not isinstance(key, Tensor)), None)
        return "" if odd is None else f", and its state has the key {odd!r}, which is no parameter"

    def names(self, *, of_every_shape: bool) -> frozenset[str]:
        """Return the names of the states that are as large as the parameter.

        Parameters without dimensions do not count: their scalar states have the same shape. ``of_every_shape``: a state
        that only some parameters have so large, as a square one has its preconditioner, is none of these.
        """
        found: dict[str, list[bool]] = {}
        for number, parameter in enumerate(self.parameters):
            for name, value in self.state(number).items() if parameter.dim() > 0 else ():
                found.setdefault(name, []).append(is_elementwise(value, parameter))
        enough = all if of_every_shape else any
        return frozenset(name for name, large in found.items() if enough(large))


@dataclass(frozen=True)
class TrialPiece:
    """A piece of a throw-away parameter, in a bucket that is stepped as on a rank."""

    parameter: int
    place: slice  # of the parameter's elements
    values: Tensor  # in the bucket, as is the gradient
    gradient: Tensor
    bucket: int
    slot: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this piece of a tensor that is as large as the parameter, 1-D."""
        return whole.detach().reshape(-1)[self.place]


class OnRank:
    """The parameters of ``whole`` as one rank steps them."""

    def __init__(
        self,
        inner: UserOptimizer,
        options: Sequence[Options],
        whole: FullParameters,
        names: frozenset[str],
        grain: Grain,
        half: int | None,
    ) -> None:
        """Lay out buckets with the present values.

        ``names``: the states that are as large as the parameter. ``grain``: of the parameters. ``half``: 0 or 1, which
        half of each the rank has in its buckets; None: it owns each parameter, which has a bucket of its own.
        """
        self._inner = inner.another()
        self._inner.note_elementwise(names)
        self._whole, self._half, self._grain = whole, half, grain
        self.groups = [copy.deepcopy(group) for group in options]
        self.pieces: list[TrialPiece] = []
        self._states: list[BucketStates] = []
        self._gradients: list[FlatBuffer] = []
        members: dict[Any, list[int]] = {}
        for number, setting in enumerate(whole.settings):
            members.setdefault(number if half is None else (setting.dtypes, setting.device), []).append(number)
        for numbers in members.values():
            first = whole.settings[numbers[0]]
            self._add(numbers, first.dtypes, first.device)
        if inner.has_modes:
            self.call(methodcaller("train"))

    def _add(self, numbers: Sequence[int], dtypes: Dtypes, device: torch.device) -> None:
        """Lay out a bucket of these parameters."""
        parameters, slots, begins, size = self._whole.parameters, list[Slot](), list[int](), 0
        for number in numbers:
            align = CUT_EVERY if self._grain == BY_BLOCK else dtypes.alignment
            begin, end = _bounds(parameters[number].numel(), align, self._half)
            if begin < end or self._half is None:
                slots.append(Slot(number, size, end - begin))
                begins.append(begin)
                size += dtypes.padded(max(end - begin, 1), str(device))
        flat, gradient = (torch.zeros(size, dtype=dtypes.step_dtype, device=device) for _ in range(2))
        index = len(self._states)
        for number, (slot, begin) in enumerate(zip(slots, begins, strict=True)):
            values, gradients = flat[slot.offset : slot.end], gradient[slot.offset : slot.end]
            place = slice(begin, begin + slot.numel)
            self.pieces.append(TrialPiece(slot.parameter, place, values, gradients, index, number))
            values.copy_(self.pieces[-1].of(parameters[slot.parameter]))
        self._states.append(self._states_of(slots, dtypes, flat))
        self._inner.create_states(self._states[-1], dict(enumerate(self.groups)))
        self._gradients.append(FlatBuffer(gradient, Placement.WHOLE))

    def _states_of(self, slots: Sequence[Slot], dtypes: Dtypes, flat: Tensor) -> BucketStates:
        cuts = EvenCuts(flat.numel(), 1, dtypes.alignment)
        bucket = BucketSpec(len(self._states), dtypes, str(flat.device), tuple(slots), flat.numel(), cuts)
        specs = [self._spec_of(slot.parameter, dtypes, str(flat.device)) for slot in slots]
        weights, instance = FlatBuffer(flat, Placement.WHOLE), self._inner.instance(None)
        return BucketStates(instance, bucket, weights, specs)

    def _spec_of(self, number: int, dtypes: Dtypes, device: str) -> ParameterSpec:
        parameter, group = self._whole.parameters[number], self._whole.settings[number].options
        shape, stride = tuple(parameter.shape), parameter.stride()
        return ParameterSpec((), shape, stride, dtypes, device, True, group, number, grain=self._grain)

    def step(self, gradients: Sequence[Tensor], names: frozenset[str]) -> None:
        """Step all pieces once.

        ``gradients``: those of the whole parameters. ``names``: the states that are as large as the parameter.
        """
        for piece in self.pieces:
            piece.gradient.copy_(piece.of(gradients[piece.parameter]))
        self._inner.note_elementwise(names)
        pairs = zip(self._states, self._gradients, strict=True)
        updates = [BucketUpdate(states, gradient, b"\1" * len(states.pieces)) for states, gradient in pairs]
        self._run(updates, unhooked_step)

    def call(self, call: Call) -> None:
        """Call a method of the class that is not its step."""
        self._run([BucketUpdate(states, None, all_present(states)) for states in self._states], call)

    def _run(self, updates: Sequence[BucketUpdate], call: Call) -> None:
        for number, options in self._inner.step(updates, dict(enumerate(self.groups)), call).items():
            self.groups[number].update(options)

    def step_nothing(self) -> None:
        """Take a step without parameters, as on a rank that owns none of a bucket."""
        setting = self._whole.settings[0]
        size = setting.dtypes.slot_alignment(str(setting.device))
        flat = torch.zeros(size, dtype=setting.dtypes.step_dtype, device=setting.device)
        nothing = self._states_of([], setting.dtypes, flat)
        self._inner.step([BucketUpdate(nothing, None, b"")], {n: dict(group) for n, group in enumerate(self.groups)})

    def state(self, piece: TrialPiece) -> Mapping[str, Any]:
        """Return the class's state of a piece: of a half, unless it is stepped by itself, without the tensors that are
        as large as the piece."""
        states = self._states[piece.bucket]
        found = states.state_of(piece.slot)
        if found is None:
            return {}
        names = found.elementwise if states.alone else ()
        flats = {name: states.flat[name].piece(states.pieces[piece.slot]) for name in names}
        if self._half is None:
            shape = self._whole.parameters[piece.parameter].shape
            flats = {name: flat.view(shape) for name, flat in flats.items()}
        return {**found.scalars, **flats}


def _bounds(size: int, align: int, half: int | None) -> tuple[int, int]:
    """Return the interval of a half; None: of all. The cut is an odd multiple of ``align``; ranks cut at multiples."""
    if half is None:
        return 0, size
    cut = (size // 2 // align | 1) * align if size > align else 0
    return (0, cut) if half == 0 else (cut, size)


def _orthogonal(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a gradient that is orthogonal to the parameter, row by row."""
    if not parameter.numel():
        return gradient
    rows = parameter.view(len(parameter) if parameter.dim() > 1 else 1, -1).float()
    along = gradient.view_as(rows)
    share = (along * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    return (along - rows * share).nan_to_num().view(parameter.shape)


def placed(settings: Sequence[Setting], dimensions: Sequence[int]) -> list[Placed]:
    """Return, for each of the ``settings``, throw-away parameters of each number of ``dimensions``."""
    small = [(setting, shape) for setting in settings for number in dimensions for shape in _shapes(number, setting)]
    large = [(setting, shape) for setting in settings for shape in large_shapes(setting.shapes)]
    return [*small, *((setting, shape) for setting, shape in large if len(shape) in dimensions)]


def large_shapes(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shape with the most elements, shortened to about twice `LARGE`; none if it has fewer than `LARGE`.

    Its sides are powers of two: it consists of whole blocks for a class whose states have a scale for each block. Equal
    sides stay equal: a square matrix may have states of its own shape.
    """
    longest = max(shapes, key=math.prod)
    if math.prod(longest) < LARGE:
        return []
    sides = [1 << (side - 1).bit_length() for side in longest]
    while math.prod(sides) > 2 * LARGE:
        most = longest[sides.index(max(sides))]
        halved = [side // 2 if was == most else side for side, was in zip(sides, longest, strict=True)]
        if math.prod(halved) < 2 * LARGE:
            break
        sides = halved
    return [tuple(sides)]


def _shapes(dimensions: int, setting: Setting) -> list[tuple[int, ...]]:
    """Return the shapes of throw-away parameters. All but those of `RAGGED` and of 96 elements have padding after them.

    If the user has matrices, the matrix is larger than the limit below which some classes treat one as small.
    """
    match dimensions:
        case 0:
            return [()]
        case 1:
            on_cpu = setting.device.type == "cpu"
            ragged = [(n * setting.dtypes.alignment,) for n in RAGGED] if on_cpu else [(RAGGED_ON_DEVICE,)]
            return [(96,), *ragged, *([(1,)] if (1,) in setting.shapes else [])]
        case 2:
            return [(131, 137) if setting.matrices else (13, 17)]
        case 3:
            return [(4, 5, 9)]
    return [(4, 5, 3, 3, *[1] * (dimensions - 4))]


def shortened(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape whose long sides are shortened; equal ones stay equal, and a longer one stays the longer one."""
    longer = sorted({size for size in shape if size > SMALL})
    return tuple(SMALL + 1 + longer.index(size) if size > SMALL else size for size in shape)
