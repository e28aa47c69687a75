"""Which partition a class needs: by elements, where ranks own pieces of parameters, or by parameter, where each
parameter has one owner.

Knows: what the user asked for, and throw-away parameters, which alone are stepped here. Does not know: who owns what.

A class that is not element-wise may be stepped by parameter, if its step of one parameter depends on no other. That is
tried: several throw-away parameters are stepped together, and each by itself, as its owner would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.cuts import EvenCuts
from ..core.layout import BucketSpec, ParameterSpec, Slot
from ..core.stage import Placement
from ..core.statetree import FormatError, Rebuild, decode, encode, kinds_in
from ..runtime.flat_buffer import FlatBuffer
from ..runtime.flat_states import BucketStates, Options
from .classes import InnerOptimizers
from .elementwise import check_elementwise
from .equality import equal_values, same
from .inner import BucketUpdate, InnerOptimizer, NotElementwiseError
from .trial import (
    STEPS,
    ClassFailedError,
    Placed,
    Setting,
    Whole,
    check_steps_alone,
    distinct,
    large_shapes,
    random_state_kept,
    rate_is_low,
    with_raised_rates,
)

PARTITIONS = ("element", "parameter")
COPIES = 2  # throw-away parameters of each shape: a class may look at others of the same shape alone
SMALL = 16  # longer sides are shortened: the classes for which this is tried take time with the cube of a side


def choose_partitions(
    inners: InnerOptimizers,
    groups: Sequence[Options],
    parameters: Sequence[ParameterSpec],
    asked: Mapping[int, str | None],
) -> tuple[list[ParameterSpec], list[str], dict[int, frozenset[str]]]:
    """Return the new parameters with their class and partition, and a line for each class that was given one unasked.

    The arguments are those of `choose_partition`. Also returns the names of the states that are as large as their
    parameter, by the number of the class. Raises `ValueError` if no partition gives a class's own bits.
    """
    names: dict[int, frozenset[str]] = {}
    found: dict[int, tuple[int, bool]] = {}  # class and partition of each new group
    said = []
    for number, inner in inners.used():
        mine = {group: name for group, name in asked.items() if inners.number(group) == number}
        members = [spec for spec in parameters if spec.group in mine]
        with _explaining_loops(inner, groups, members):
            names[number], by_parameter, why = choose_partition(inner, groups, members, mine)
        found |= {group: (number, group in by_parameter) for group in mine}
        if why:
            said.append(
                f"{inner.name} is not element-wise ({why}), so each parameter has one owner, which steps it whole "
                '(partition="parameter")'
            )
    chosen = [found[spec.group] for spec in parameters]
    return (
        [
            replace(spec, optimizer_class=number, whole=whole)
            for spec, (number, whole) in zip(parameters, chosen, strict=True)
        ],
        said,
        names,
    )


def choose_partition(
    inner: InnerOptimizer,
    groups: Sequence[Options],
    parameters: Sequence[ParameterSpec],
    asked: Mapping[int, str | None],
) -> tuple[frozenset[str], frozenset[int], str]:
    """Choose the partition of each param group of a class.

    Args:
        inner: the class.
        groups: all param groups.
        parameters: those of the groups in ``asked``.
        asked: of each new group, by its number, the partition that the user asked for; None: whichever the class needs.

    Returns:
        The names of the states that are as large as their parameter, the numbers of the groups that are partitioned by
        parameter, and why these are although nobody asked, or "".

    Raises:
        ValueError: no partition, or not the one that was asked for, gives the class's own bits.
    """
    by_parameter = frozenset(group for group, name in asked.items() if name == "parameter")
    names: frozenset[str] = frozenset()
    why = ""
    try:
        names = check_elementwise(inner, groups, [spec for spec in parameters if spec.group not in by_parameter])
    except NotElementwiseError as error:
        if "element" in asked.values():
            raise
        by_parameter, why = frozenset(asked), error.why
    whole = [spec for spec in parameters if spec.group in by_parameter]
    return names | check_by_parameter(inner, groups, whole), by_parameter, why


def check_partitions(asked: Mapping[int, Any]) -> None:
    """Raise `ValueError` naming a param group whose ``partition`` is none. ``asked``: as in `choose_partition`."""
    for number, name in asked.items():
        if name is not None and name not in PARTITIONS:
            raise ValueError(
                f'partition must be "element" (ranks own pieces of parameters) or "parameter" (each parameter has one '
                f"owner), not {name!r}, as in param group {number}"
            )


def check_classes(
    inners: InnerOptimizers, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> dict[int, frozenset[str]]:
    """Raise `ValueError` unless each class gives its own bits in the partition that its ``parameters`` have.

    ``groups``: param groups with other options, which name no class. Returns the names of the states that are as large
    as their parameter, by the number of the class.
    """
    found: dict[int, frozenset[str]] = {}
    for number in sorted({spec.optimizer_class for spec in parameters}):
        inner, mine = inners[number], [spec for spec in parameters if spec.optimizer_class == number]
        with _explaining_loops(inner, groups, mine):
            found[number] = (
                inner.elementwise
                | check_elementwise(inner, groups, [spec for spec in mine if not spec.whole])
                | check_by_parameter(inner, groups, [spec for spec in mine if spec.whole])
            )
    return found


def check_by_parameter(
    inner: InnerOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> frozenset[str]:
    """Raise `ValueError` unless the class steps each parameter alone to the bits to which it steps several together.

    The class steps throw-away parameters with the options of the ``groups`` of ``parameters``, and of their shapes,
    with long sides shortened, and one that is larger. Low learning rates are raised, if the class accepts that. The
    states of random generators do not change.

    Returns the names of the states that are as large as their parameter. Notes the tensor subclasses among states in
    ``inner.kinds``.
    """
    if not parameters:
        return frozenset()
    names, kinds = try_by_parameter(inner, groups, parameters)
    inner.kinds |= kinds
    return names


def try_by_parameter(
    inner: InnerOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> tuple[frozenset[str], Mapping[str, Rebuild]]:
    """Do what `check_by_parameter` says. Return the names, and the tensor subclasses among states."""
    options, settings = distinct(inner.defaults, groups, parameters)
    shapes = [
        (setting, shape)
        for setting in settings
        for shape in sorted({*map(_shortened, setting.shapes), *large_shapes(setting.shapes)})
    ]
    with random_state_kept(settings):
        if any(map(rate_is_low, options)):
            try:
                return _compare(*with_raised_rates(inner, options), shapes)
            except ClassFailedError:
                pass
        try:
            return _compare(inner, options, shapes)
        except ClassFailedError as error:
            check_steps_alone(inner, error)
            _find_refused(inner, options, settings, parameters)
            raise _needs_all(inner, f"a step over throw-away parameters failed ({error})") from error


@contextmanager
def _explaining_loops(
    inner: InnerOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> Iterator[None]:
    """Add to a `ValueError` how a loop is named, if a group with torch's default loop is on the CPU and another device.

    The default for all of its parameters is then the plain loop. For those of the other device alone, which a rank
    steps by themselves, it is the kernels for lists of tensors.
    """
    try:
        yield
    except ValueError as error:
        for number in sorted({spec.group for spec in parameters}):
            options = {**inner.defaults, **groups[number]}
            devices = sorted({spec.device for spec in parameters if spec.group == number})
            by_default = options.get("foreach", False) is None and options.get("fused") is None
            if by_default and devices[0] == "cpu" and len(devices) > 1:
                more = ", or fused=True" if "fused" in options else ""
                raise ValueError(
                    f"{error}. Param group {number} is on {' and '.join(devices)}, where torch's default loop depends "
                    "on all its parameters together: name a loop, foreach=False (the default there) or "
                    f"foreach=True{more}"
                ) from error
        raise


def _compare(
    inner: InnerOptimizer, options: Sequence[Options], shapes: Sequence[Placed]
) -> tuple[frozenset[str], Mapping[str, Rebuild]]:
    """Step throw-away parameters together and each alone, and compare. Return the names of states as large as the
    parameter, and the tensor subclasses among states.

    Raises `ValueError` on a difference, `ClassFailedError` if the class raised over all together.
    """
    together = Whole(inner, options, [placed for placed in shapes for _ in range(COPIES)])
    alone = _Alone(inner, options, together)
    for step in range(STEPS):
        gradients = together.gradients(step)
        together.step(gradients)
        names = _names(together)
        try:
            alone.step(gradients, names)
        except Exception as error:
            raise _needs_all(inner, f"a step over one parameter failed ({error})") from error
        for number, parameter in enumerate(together.parameters):
            if not equal_values(parameter.detach().reshape(-1), alone.values[number].reshape(-1)):
                shape = tuple(parameter.shape)
                raise _needs_all(
                    inner,
                    f"beside others a parameter of shape {shape} was stepped to other bits than alone, within "
                    f"{step + 1} of {STEPS} steps",
                )
    for number in range(len(together.parameters)):
        one, other = dict(together.state(number)), alone.state(number)
        for name in sorted(one.keys() | other.keys()):
            if not same(one.get(name), other.get(name)):
                raise _needs_all(inner, f"its state {name!r} came to another value beside other parameters than alone")
    for number, (mine, theirs) in enumerate(zip(together.groups, alone.groups, strict=True)):
        if not all(same(value, theirs.get(name)) for name, value in mine.items()):
            raise _needs_all(inner, f"it put other options into param group {number} for all parameters than for one")
    try:
        alone.step_nothing()
    except Exception as error:
        raise _needs_all(inner, f"a step over no parameter failed ({error}), as a rank takes that owns none") from error
    return names, _kinds(inner, together)


def _kinds(inner: InnerOptimizer, trial: Whole) -> dict[str, Rebuild]:
    """Return the tensor subclasses among states. Raises `ValueError` for one that is not rebuilt as it was from what is
    sent and saved of it."""
    found: dict[str, Rebuild] = {}
    for number in range(len(trial.parameters)):
        for name, value in trial.state(number).items():
            own = kinds_in(value)
            if not own:
                continue
            problem = f"its state {name!r} is another one when it is rebuilt by __tensor_unflatten__"
            try:
                again = decode(*encode(value, f"its state {name!r}", wrappers=True), own)
            except (TypeError, FormatError) as error:
                again, problem = None, str(error)
            if not same(value, again):
                raise ValueError(f"{inner.name} keeps states in {' and '.join(own)}, which cannot be saved: {problem}")
            found |= own
    return found


def _find_refused(
    inner: InnerOptimizer,
    options: Sequence[Options],
    settings: Sequence[Setting],
    parameters: Sequence[ParameterSpec],
) -> None:
    """Raise `ValueError` naming a parameter whose shape the class refuses, if it takes others."""
    shapes = [(setting, shape) for setting in settings for shape in setting.shapes]
    refused: dict[tuple[int, ...], ClassFailedError] = {}
    for setting, shape in shapes:
        try:
            one = Whole(inner, options, [(setting, _shortened(shape))])
            one.step(one.gradients(0))
        except ClassFailedError as error:
            refused[shape] = error
    if len(refused) < len({shape for _, shape in shapes}):
        for spec in parameters:
            if spec.shape in refused:
                raise ValueError(
                    f"{inner.name} refuses {spec.name!r}, of shape {spec.shape}: {refused[spec.shape]}. List for it "
                    "only parameters that it takes"
                )


def _needs_all(inner: InnerOptimizer, why: str) -> ValueError:
    return ValueError(
        f"{inner.name} cannot be sharded: {why}. A rank steps the parameters that it owns, each by itself, so only "
        "classes whose step of a parameter depends on nothing but that parameter, its gradient and its state can be "
        "sharded"
    )


def _shortened(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape whose long sides are shortened; equal ones stay equal, and a longer one stays the longer one."""
    longer = sorted({size for size in shape if size > SMALL})
    return tuple(SMALL + 1 + longer.index(size) if size > SMALL else size for size in shape)


def _names(trial: Whole) -> frozenset[str]:
    """Return the names of the states that are as large as their parameter, whatever its shape.

    Those that only some parameters have so large (a preconditioner of a square one) are none of them. Parameters
    without dimensions do not count: their scalar states have the same shape.
    """
    found: dict[str, bool] = {}
    for number, parameter in enumerate(trial.parameters):
        for name, value in trial.state(number).items() if parameter.dim() else ():
            large = isinstance(value, Tensor) and value.shape == parameter.shape
            found[name] = found.get(name, True) and large
    return frozenset(name for name, large in found.items() if large)


class _Alone:
    """The throw-away parameters of ``together``, each in a bucket of its own, stepped as its owner steps it."""

    def __init__(self, inner: InnerOptimizer, options: Sequence[Options], together: Whole) -> None:
        self._inner = inner.another()
        self.groups: list[Options] = [dict(group) for group in options]
        self._states: list[BucketStates] = []
        self._gradients: list[FlatBuffer] = []
        self.values: list[Tensor] = []
        for number, (setting, whole) in enumerate(zip(together.settings, together.parameters, strict=True)):
            dtypes = setting.dtypes
            size = dtypes.padded(max(whole.numel(), 1), str(setting.device))
            slots, cuts = (Slot(number, 0, whole.numel()),), EvenCuts(size, 1, dtypes.alignment)
            bucket = BucketSpec(number, dtypes, str(setting.device), slots, size, cuts)
            flat, gradient = (torch.zeros(size, dtype=whole.dtype, device=whole.device) for _ in range(2))
            self.values.append(flat[: whole.numel()].view(whole.shape))
            self.values[-1].copy_(whole.detach())
            shape = (tuple(whole.shape), whole.stride())
            weights, instance = FlatBuffer(flat, Placement.WHOLE), self._inner.instance(None)
            states = BucketStates(instance, bucket, weights, [setting.options], [shape], whole=True)
            self._inner.begin(states, dict(enumerate(self.groups)))
            self._states.append(states)
            self._gradients.append(FlatBuffer(gradient, Placement.WHOLE))
        dtypes, device = together.settings[0].dtypes, together.settings[0].device
        align = dtypes.slot_alignment(str(device))
        nothing = FlatBuffer(torch.zeros(align, dtype=dtypes.master_dtype, device=device), Placement.WHOLE)
        bucket = BucketSpec(len(self._states), dtypes, str(device), (), align, EvenCuts(align, 1, align))
        self._nothing = BucketStates(self._inner.instance(None), bucket, nothing, [], [], whole=True)

    def step_nothing(self) -> None:
        """Take a step without parameters, as on a rank that owns none of a bucket."""
        self._inner.step([BucketUpdate(self._nothing, None, b"")], {n: dict(g) for n, g in enumerate(self.groups)})

    def step(self, gradients: Iterable[Tensor], names: frozenset[str]) -> None:
        """Step every parameter once. ``names``: the states that are as large as their parameter."""
        self._inner.note_elementwise(names)
        for gradient, buffer in zip(gradients, self._gradients, strict=True):
            buffer.data[: gradient.numel()].view(gradient.shape).copy_(gradient)
        pairs = zip(self._states, self._gradients, strict=True)
        updates = [BucketUpdate(states, gradient, b"\1") for states, gradient in pairs]
        changed = self._inner.step(updates, dict(enumerate(self.groups)))
        for number, options in changed.items():
            self.groups[number].update(options)

    def state(self, number: int) -> dict[str, Any]:
        """Return the class's state of a parameter."""
        states, shape = self._states[number], self.values[number].shape
        found = states.state_of(0)
        if found is None:
            return {}
        flat = {name: states.flat[name].data[: shape.numel()].view(shape) for name in found.elementwise}
        return {**found.scalars, **flat}
