"""The check that an optimizer class is element-wise: steps over pieces of parameters give the bits of whole steps.

Knows: which options and shapes are tried, and which results must be equal. Does not know: how pieces are laid out,
ranks.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..core.layout import ParameterSpec
from ..runtime.flat_states import Options, is_elementwise
from .equality import equal_values, same
from .inner import InnerOptimizer, NotElementwiseError
from .trial import (
    STEPS,
    ClassFailedError,
    Half,
    Setting,
    Whole,
    decay_is_low,
    distinct,
    placed,
    random_state_kept,
    rate_is_low,
    with_raised_rates,
)

FEW_STEPS = 3  # with the user's learning rates, before low ones are raised
DIMENSIONS = frozenset({0, 1, 2, 4})


def check_elementwise(
    inner: InnerOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> frozenset[str]:
    """Raise `ValueError` unless the class gives the same bits over whole parameters and over pieces of them.

    The class steps throw-away parameters with the options of the ``groups`` of ``parameters``; equal options are tried
    once. The throw-away parameters have every number of dimensions that ``parameters`` have, and those in `DIMENSIONS`
    that the class accepts. Learning rates below `RAISED_RATE` are first tried unchanged for `FEW_STEPS`, then raised to
    it for all `STEPS`, if the class accepts that. Then `FEW_STEPS` follow in which low weight decays are raised, too:
    fused Adam on CUDA rounds the decay in one of its loops otherwise than in the other. The states of random generators
    do not change.

    Returns the names of the states that are as large as the parameter.
    """
    if not parameters:
        return frozenset()
    names = {len(spec.shape): spec.name for spec in reversed(parameters)}
    options, settings = distinct(inner.defaults, groups, parameters)
    with random_state_kept(settings):
        few = any(map(rate_is_low, options))
        found, dimensions = _try(inner, options, settings, names, FEW_STEPS if few else STEPS)
        if few:
            raised = _compare_raised(inner, options, settings, dimensions, ("lr",), STEPS)
            found = _try(inner, options, settings, names, STEPS)[0] if raised is None else raised
        if any(map(decay_is_low, options)):
            for raised_names in (("lr", "weight_decay"), ("weight_decay",)):  # the class may refuse a higher rate alone
                if _compare_raised(inner, options, settings, dimensions, raised_names, FEW_STEPS) is not None:
                    break
        return found


def _try(
    inner: InnerOptimizer,
    options: Sequence[Options],
    settings: Sequence[Setting],
    names: Mapping[int, str],
    steps: int,
) -> tuple[frozenset[str], Sequence[int]]:
    """Compare over all numbers of dimensions that the class accepts. Return the result of `_compare`, and these.

    ``names``: for each number of dimensions among the user's parameters, the name of one.
    """
    dimensions = sorted(DIMENSIONS | names.keys())
    try:
        return _compare(inner, options, settings, dimensions, steps), dimensions
    except ClassFailedError:
        dimensions = _accepted(inner, options, settings, dimensions, names)
    try:
        return _compare(inner, options, settings, dimensions, steps), dimensions
    except ClassFailedError as error:
        raise NotElementwiseError(inner.name, f"a step over several parameters failed ({error})") from error


def _compare_raised(
    inner: InnerOptimizer,
    options: Sequence[Options],
    settings: Sequence[Setting],
    dimensions: Sequence[int],
    names: Sequence[str],
    steps: int,
) -> frozenset[str] | None:
    """Compare with low rates of these names raised. Return None if the class refuses such rates."""
    try:
        return _compare(*with_raised_rates(inner, options, names), settings, dimensions, steps)
    except ClassFailedError:
        return None


def _accepted(
    inner: InnerOptimizer,
    options: Sequence[Options],
    settings: Sequence[Setting],
    dimensions: Sequence[int],
    names: Mapping[int, str],
) -> list[int]:
    """Return the numbers of dimensions that the class accepts.

    Raises `ValueError` if it refuses all, or one that the user's parameters have.
    """
    refused: dict[int, Exception] = {}
    for number in dimensions:
        try:
            whole = Whole(inner, options, placed(settings, [number]))
            for step in range(STEPS):
                whole.step(whole.gradients(step))
        except ClassFailedError as error:
            refused[number] = error
    for number, problem in refused.items():
        if len(refused) == len(dimensions):
            raise NotElementwiseError(inner.name, f"a step over a throw-away parameter failed ({problem})") from problem
        if number in names:
            raise ValueError(
                f"{inner.name} refuses a parameter of {number} dimensions, as {names[number]!r} is: {problem}"
            ) from problem
    return [number for number in dimensions if number not in refused]


def _compare(
    inner: InnerOptimizer,
    options: Sequence[Options],
    settings: Sequence[Setting],
    dimensions: Sequence[int],
    steps: int,
) -> frozenset[str]:
    """Step throw-away parameters whole and in halves, and compare. Return the names of states as large as the
    parameter. Raises `ValueError` on a difference, `ClassFailedError` if the class raised over whole parameters."""
    whole = Whole(inner, options, placed(settings, dimensions))
    with _refusing(inner, "it refuses flat pieces"):
        halves = [Half(inner, options, whole, number) for number in range(2)]
    for step in range(steps):
        gradients = whole.gradients(step)
        whole.step(gradients)
        if step == 0:
            _check_states(inner, whole)
        names = whole.names()
        for half in halves:
            with _refusing(inner, "a step over flat pieces failed"):
                half.step(gradients, names)
            for piece in half.pieces if step % 3 == 2 or step == steps - 1 else ():
                parameter = whole.parameters[piece.parameter]
                if not equal_values(piece.of(parameter), piece.values):
                    raise NotElementwiseError(
                        inner.name,
                        f"a parameter of shape {tuple(parameter.shape)} was stepped to other bits in pieces than "
                        f"whole, within {step + 1} of {steps} steps",
                    )
    _check_states(inner, whole)
    for half in halves:
        _compare_scalars(inner, whole, half, names)
    return names


@contextmanager
def _refusing(inner: InnerOptimizer, what: str) -> Iterator[None]:
    """Raise any error of the block as "the class is not element-wise"."""
    try:
        yield
    except Exception as error:
        raise NotElementwiseError(inner.name, f"{what} ({error})") from error


def _check_states(inner: InnerOptimizer, whole: Whole) -> None:
    """Raise `ValueError` if a state is neither as large as its parameter nor a scalar: it cannot be cut into pieces."""
    for number, parameter in enumerate(whole.parameters):
        for name, value in whole.state(number).items():
            plain = not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter)
            if not plain or (not is_elementwise(value, parameter) and not _is_scalar(value)):
                of_shape = plain and isinstance(value, Tensor)
                kind = f"has shape {tuple(value.shape)}" if of_shape else f"is a {type(value).__name__}"
                raise NotElementwiseError(
                    inner.name, f"its state {name!r} {kind}, where the parameter has shape {tuple(parameter.shape)}"
                )


def _is_scalar(value: Any) -> bool:
    """Return True for a scalar, and for a list or tuple of nothing but scalars."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(_is_scalar(inside) for inside in value)
    return value is None or isinstance(value, (numbers.Number, str))


def _compare_scalars(inner: InnerOptimizer, whole: Whole, half: Half, large: frozenset[str]) -> None:
    """Raise `ValueError` if scalar states or options differ between whole parameters and pieces.

    They may differ long before the parameters do, and they are saved in state dicts.
    """
    for mine, theirs in zip(whole.groups, half.groups, strict=True):
        for name, value in mine.items():
            if not same(value, theirs.get(name)):
                raise NotElementwiseError(
                    inner.name, f"it put another {name!r} into a param group of pieces than of wholes"
                )
    for piece in half.pieces:
        state = half.scalars(piece)
        for name, value in whole.state(piece.parameter).items():
            if name not in large and not same(value, state.get(name)):
                raise NotElementwiseError(
                    inner.name, f"its state {name!r} came to another value for pieces than for wholes"
                )
