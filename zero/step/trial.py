"""Throw-away parameters for trials of a class: stepped whole by the class itself, and in two halves as on two ranks.

Knows: the shapes and values of these parameters, their gradients, and how halves are laid out. Does not know: the
user's parameters, and the comparison of results.

    whole     [ 1-D ] [ 2-D       ] [ 4-D    ] [ scalar ]      stepped by the class itself, as in a plain loop
    half 0    [ 1-D 2-D... 4-D.. ]                             stepped by `InnerOptimizer`, as on a rank: neighbouring
    half 1    [ 1-D 2-D.... ] [ 4-D.. ] [ scalar ]             pieces form a run, up to one with padding after it
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.cuts import EvenCuts
from ..core.layout import BucketSpec, Dtypes, ParameterSpec, Slot
from ..core.stage import Placement
from ..runtime.flat_buffer import FlatBuffer
from ..runtime.flat_states import BucketStates, Options, is_elementwise
from .inner import NO_OPTIONS, BucketUpdate, InnerOptimizer, unhooked_step

# With AVX-512 torch computes `sigmoid` and `pow` of 128 bytes at once, and of a rest of fewer in another way. Ranks cut
# at multiples of 64 bytes. Throw-away tensors of so many times 64 bytes have such a rest if they are stepped whole, and
# hardly any in pieces, which lie side by side without padding.
RAGGED = (1, 3, 5, 7, 9, 11, 13, 15)
# Torch's kernels for lists of tensors on CUDA take another loop if a length is no multiple of 4 (kILP in
# MultiTensorApply.cuh). Throw-away tensors of so many elements are stepped whole in it, and a half of them is not.
RAGGED_ON_DEVICE = 97
LARGE = 1 << 12  # elements from which on a class may keep its states in 8 bits or fewer
STEPS = 12  # more than classes take to warm up by themselves (RAdam 5, SOAP 10)
# With a lower learning rate, which a scheduler may raise later, rounding could hide an update; with a lower weight
# decay, how the decay is rounded. It is no power of two: products with one are exact, whatever a kernel rounds.
RAISED_RATE = 0.3


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


class ClassFailedError(Exception):
    """The class itself raised an error over whole parameters."""


def check_steps_alone(inner: InnerOptimizer, problem: Exception) -> None:
    """Raise `ValueError` if a class failed because it needs more than its step, as schedule-free classes do."""
    made: Any = inner.optimizer_class
    if callable(getattr(made, "train", None)) and callable(getattr(made, "eval", None)):
        raise ValueError(
            f"{inner.name} cannot be sharded: its train() and eval() replace the weights by others, and its step needs "
            f"such a call ({problem}). A ZeroOptimizer calls nothing but step(); a zero.ShardedAverage beside another "
            "class has averaged weights for evaluations"
        ) from problem


Placed = tuple[Setting, tuple[int, ...]]  # a throw-away parameter: its kind and its shape


class Whole:
    """Throw-away parameters, stepped by the class. Raises `ClassFailedError` if the class refuses them."""

    def __init__(self, inner: InnerOptimizer, options: Sequence[Options], shapes: Sequence[Placed]) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._shapes = list(dict.fromkeys(shape for _, shape in shapes))
        self._sizes = [self._noise(shape) for shape in self._shapes]  # magnitudes of the elements' gradients
        values = {shape: self._noise(shape) ** 5 for shape in self._shapes}  # of many magnitudes
        self.settings = [setting for setting, _ in shapes]
        self.parameters = [
            values[shape].to(setting.device, setting.dtypes.master_dtype, copy=True).requires_grad_()
            for setting, shape in shapes
        ]
        groups: list[Options] = [{**copy.deepcopy(group), "params": []} for group in options]
        for setting, parameter in zip(self.settings, self.parameters, strict=True):
            groups[setting.options]["params"].append(parameter)
        try:
            self._optimizer = inner.plain(groups)
        except Exception as error:
            raise ClassFailedError(str(error)) from error

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
        try:
            unhooked_step(self._optimizer)()
        except Exception as error:
            raise ClassFailedError(str(error)) from error

    def state(self, parameter: int) -> Mapping[str, Any]:
        """Return the class's state of a parameter."""
        state: dict[str, Any] = self._optimizer.state[self.parameters[parameter]]
        return state

    def names(self) -> frozenset[str]:
        """Return the names of the states that are as large as the parameter.

        Parameters without dimensions do not count: their scalar states have the same shape.
        """
        return frozenset(
            name
            for number, parameter in enumerate(self.parameters)
            for name, value in self.state(number).items()
            if parameter.dim() > 0 and is_elementwise(value, parameter)
        )


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


class Half:
    """One half of each parameter of ``whole``, stepped as a rank steps its slices of buckets."""

    def __init__(self, inner: InnerOptimizer, options: Sequence[Options], whole: Whole, half: int) -> None:
        self._inner = inner.another()
        self._inner.note_elementwise(whole.names())
        self.groups = [copy.deepcopy(group) for group in options]
        self._states: list[BucketStates] = []
        self._gradients: list[FlatBuffer] = []
        self.pieces: list[TrialPiece] = []
        for dtypes, device in dict.fromkeys((setting.dtypes, setting.device) for setting in whole.settings):
            self._add(whole, half, dtypes, device)

    def _add(self, whole: Whole, half: int, dtypes: Dtypes, device: torch.device) -> None:
        """Lay out a bucket of the parameters with these dtypes on this device."""
        slots: list[Slot] = []
        begins, size = [], 0
        for number, setting in enumerate(whole.settings):
            begin, end = _bounds(whole.parameters[number].numel(), dtypes.alignment, half)
            if (setting.dtypes, setting.device) == (dtypes, device) and begin < end:
                slots.append(Slot(number, size, end - begin))
                begins.append(begin)
                size += dtypes.padded(end - begin, str(device))
        flat, gradient = (torch.zeros(size, dtype=dtypes.master_dtype, device=device) for _ in range(2))
        cuts = EvenCuts(size, 1, dtypes.alignment)
        bucket = BucketSpec(len(self._gradients), dtypes, str(device), tuple(slots), size, cuts)
        for number, (slot, begin) in enumerate(zip(slots, begins, strict=True)):
            values, gradients = flat[slot.offset : slot.end], gradient[slot.offset : slot.end]
            part = slice(begin, begin + slot.numel)
            self.pieces.append(TrialPiece(slot.parameter, part, values, gradients, bucket.index, number))
            values.copy_(self.pieces[-1].of(whole.parameters[slot.parameter]))
        groups = [whole.settings[slot.parameter].options for slot in slots]
        shapes = [(tuple(p.shape), p.stride()) for p in (whole.parameters[slot.parameter] for slot in slots)]
        weights = FlatBuffer(flat, Placement.WHOLE)
        states = BucketStates(self._inner.instance(None), bucket, weights, groups, shapes)
        self._inner.begin(states, dict(enumerate(self.groups)))
        self._states.append(states)
        self._gradients.append(FlatBuffer(gradient, Placement.WHOLE))

    def step(self, gradients: Sequence[Tensor], names: frozenset[str]) -> None:
        """Step all pieces once.

        ``gradients``: those of the whole parameters. ``names``: the states that are as large as the parameter.
        """
        for piece in self.pieces:
            piece.gradient.copy_(piece.of(gradients[piece.parameter]))
        self._inner.note_elementwise(names)
        pairs = zip(self._states, self._gradients, strict=True)
        updates = [BucketUpdate(states, gradient, b"\1" * len(states.pieces)) for states, gradient in pairs]
        changed = self._inner.step(updates, dict(enumerate(self.groups)))
        for number, options in changed.items():
            self.groups[number].update(options)

    def scalars(self, piece: TrialPiece) -> Mapping[str, Any]:
        """Return the class's state of a piece, without the tensors that are as large as the piece."""
        state = self._states[piece.bucket].state_of(piece.slot)
        return {} if state is None else state.scalars


def _bounds(size: int, align: int, half: int) -> tuple[int, int]:
    """Return the interval of a half. The cut is an odd multiple of ``align``; ranks cut at multiples of it."""
    cut = (size // 2 // align | 1) * align if size > align else 0
    return (0, cut) if half == 0 else (cut, size)


def placed(settings: Sequence[Setting], dimensions: Sequence[int]) -> list[Placed]:
    """Return, for each of the ``settings``, throw-away parameters of each number of ``dimensions``."""
    small = [(setting, shape) for setting in settings for number in dimensions for shape in _shapes(number, setting)]
    large = [(setting, shape) for setting in settings for shape in large_shapes(setting.shapes)]
    return [*small, *((setting, shape) for setting, shape in large if len(shape) in dimensions)]


def large_shapes(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shape with the most elements, shortened to at most twice `LARGE`; none if it has fewer than `LARGE`.

    Its sides are powers of two: it consists of whole blocks for a class whose states have a scale for each block.
    """
    sides = list(max(shapes, key=math.prod))
    if math.prod(sides) < LARGE:
        return []
    sides = [1 << (side - 1).bit_length() for side in sides]
    while math.prod(sides) > 2 * LARGE:
        sides[sides.index(max(sides))] //= 2
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


def _orthogonal(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a gradient that is orthogonal to the parameter, row by row."""
    if not parameter.numel():
        return gradient
    rows = parameter.view(len(parameter) if parameter.dim() > 1 else 1, -1).float()
    along = gradient.view_as(rows)
    share = (along * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    return (along - rows * share).nan_to_num().view(parameter.shape)


def distinct(
    defaults: Options, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> tuple[list[Options], list[Setting]]:
    """Return the distinct options of the groups, and the settings in which parameters have them."""
    numbers_of: dict[str, int] = {}
    options: list[Options] = []
    number_of: dict[int, int] = {}  # by group
    for group in dict.fromkeys(spec.group for spec in parameters):
        given = {key: value for key, value in groups[group].items() if key not in NO_OPTIONS}
        given = {**defaults, **given}
        number_of[group] = numbers_of.setdefault(_text_of(given), len(options))
        if number_of[group] == len(options):
            options.append(given)
    shapes: dict[tuple[int, Dtypes, str], set[tuple[int, ...]]] = {}
    for spec in parameters:
        shapes.setdefault((number_of[spec.group], spec.dtypes, spec.device), set()).add(spec.shape)
    settings = [
        Setting(number, dtypes, torch.device(device), tuple(sorted(found)))
        for (number, dtypes, device), found in shapes.items()
    ]
    return options, settings


def rate_is_low(options: Options) -> bool:
    """Return whether the option ``lr`` is below `RAISED_RATE`."""
    return _is_low(options, "lr")


def decay_is_low(options: Options) -> bool:
    """Return whether the option ``weight_decay`` is above 0 and below `RAISED_RATE`."""
    return _is_low(options, "weight_decay")


def with_raised_rates(
    inner: InnerOptimizer, options: Sequence[Options], names: Sequence[str] = ("lr",)
) -> tuple[InnerOptimizer, list[Options]]:
    """Return the class and the options, where those of ``names`` that are low are raised to `RAISED_RATE`.

    They are raised both in the class's arguments and in the groups, since a class may keep both. Raises
    `ClassFailedError` if the class refuses such a rate.
    """
    try:
        raised = inner.another(**_raised(inner.defaults, names))
    except TypeError:  # the class has no argument for it
        raised = inner
    except Exception as error:
        raise ClassFailedError(str(error)) from error
    return raised, [{**given, **_raised(given, names)} for given in options]


def _raised(options: Options, names: Sequence[str]) -> Options:
    """Return those of ``names`` that are low, raised."""
    return {
        name: torch.full_like(options[name], RAISED_RATE) if isinstance(options[name], Tensor) else RAISED_RATE
        for name in names
        if _is_low(options, name)
    }


def _is_low(options: Options, name: str) -> bool:
    rate = options.get(name)
    if not isinstance(rate, (int, float, Tensor)) or (isinstance(rate, Tensor) and rate.numel() != 1):
        return False
    return bool(rate < RAISED_RATE) and (name == "lr" or bool(rate > 0))


def _text_of(value: Any) -> str:
    """Return a text that is equal for equal options, by which they are looked up. Other than plain values are equal to
    themselves alone."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.device} {value.tolist()}"
    if isinstance(value, dict):
        return str([(key, _text_of(inside)) for key, inside in value.items()])
    if isinstance(value, (list, tuple)):
        return str((type(value), [_text_of(inside) for inside in value]))
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value)} {id(value)}"


@contextmanager
def random_state_kept(settings: Sequence[Setting]) -> Iterator[None]:
    devices = list(dict.fromkeys(setting.device for setting in settings if setting.device.type not in ("cpu", "meta")))
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        yield
