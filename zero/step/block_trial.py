"""The trial of a class that keeps values for blocks of elements: steps of pieces give the bits of steps of the whole.
And of which states each block of a stack has its own.

Knows: which parameters may be cut between blocks, and how the states of pieces form the whole ones. Does not know: who
owns which piece.

Such a class chooses by a tensor's number of elements whether it keeps states in fewer bits: by a limit, or by whether
they fill blocks. A parameter is cut only if each piece makes the choice of the whole one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.bits import row_major_stride
from ..core.grain import BY_BLOCK, CUT_EVERY, WHOLE
from ..core.layout import ParameterSpec
from ..core.parameter_specs import flattened
from ..core.runs import BlockRule, Rules, joined, merged, part_of
from ..core.stage import step_device
from ..core.statetree import encode
from ..runtime.flat_states import Options
from .arguments import same
from .throwaway import ClassFailedError, FullParameters, OnRank, Placed, large_shapes, shortened
from .trial import FEW_STEPS, ByParameter, distinct, random_state_kept
from .user_optimizer import UserOptimizer

CHOICES = 1 << 20  # elements of the largest throw-away parameter of which a choice is compared


def may_be_cut(spec: ParameterSpec) -> bool:
    """Return whether a parameter has room for two pieces, and is row-major."""
    return spec.numel >= 2 * CUT_EVERY and spec.stride == torch.empty(spec.shape, device="meta").stride()


def cut_in_blocks(
    inner: UserOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> tuple[list[ParameterSpec], frozenset[str]]:
    """Return those of the parameters that are cut between blocks, and the names of their states that are as large as
    the parameter. The others have one owner each.

    Notes how their states are divided. Raises `ValueError` if the class steps pieces of them otherwise than the whole.
    """
    found: dict[Any, bool] = {}  # of parameters of equal options and sizes

    def alike(spec: ParameterSpec) -> bool:
        sizes = (spec.numel % CUT_EVERY, min(spec.numel, CHOICES), len(spec.shape))
        key = (spec.group, spec.dtypes, step_device(spec), sizes)
        if key not in found:
            found[key] = _chooses_alike(inner, groups, spec)
        return found[key]

    chosen = [spec for spec in parameters if may_be_cut(spec) and alike(spec)]
    if not chosen:
        return [], frozenset()
    trial = ByBlocks(inner, groups, chosen)
    names, kinds = trial.run()
    inner.note_kinds(kinds)
    inner.note_rules(trial.rules)
    return chosen, names


def _chooses_alike(inner: UserOptimizer, groups: Sequence[Options], spec: ParameterSpec) -> bool:
    """Return whether the class keeps states of the same kinds for the smallest pieces of a parameter as for all of it.

    Of a larger one than `CHOICES` it is asked for one of about so many elements, with as many after its last cut.
    """
    options, settings = distinct(inner.defaults, groups, [spec])
    rest = spec.numel % CUT_EVERY
    whole = _throw_away(spec.shape, min(spec.numel, CHOICES + rest))
    shapes = [(CUT_EVERY,), (CUT_EVERY + rest,), whole]
    with random_state_kept(settings):
        try:
            made = FullParameters(inner, options, [(each, shape) for each in settings for shape in shapes])
            made.step(made.gradients(0))
        except ClassFailedError:
            return False
    found = [_kinds(dict(made.state(number))) for number in range(len(made.parameters))]
    return all(kinds == found[0] for kinds in found)


def _kinds(value: Any) -> Any:
    """Return what a state is, without its values and sizes."""
    if isinstance(value, dict):
        return {key: _kinds(inside) for key, inside in value.items()}
    if not isinstance(value, Tensor):
        return type(value)
    inner, _ = flattened(value)
    return type(value), value.dtype, {name: _kinds(getattr(value, name)) for name in inner}


def _is_known(value: Any) -> bool:
    """Return whether pieces of a state can be compared with the whole: it is not an object of the class's own."""
    try:
        encode(value, "", wrappers=True)
    except TypeError:
        return False
    return True


def _throw_away(shape: Sequence[int], size: int | None = None) -> tuple[int, ...]:
    """Return a shape of as many dimensions and of ``size`` elements. None: of two pieces, the last as ragged.

    Its rows are short, and ``shape`` has whole multiples of them in a row: a class may begin a block with each row.
    """
    size = 2 * CUT_EVERY + math.prod(shape) % CUT_EVERY if size is None else size
    if len(shape) < 2:
        return (size,)
    columns = math.gcd(size, shape[-1], 64)
    return (*[1] * (len(shape) - 2), size // columns, columns)


def _form(
    name: str, value: Any, pieces: Sequence[tuple[slice, Mapping[str, Any]]], shape: torch.Size, rules: Rules
) -> bool:
    """Return whether the pieces' states of this name, with their places, form the whole parameter's ``value``."""
    try:
        parts = [part_of({name: value}, place, shape.numel(), rules)[name] for place, _ in pieces]
        formed = joined([{name: piece[name]} for _, piece in pieces], shape, rules)[name]
    except (TypeError, ValueError, RuntimeError, AssertionError):
        return False
    return same(value, formed) and all(same(part, piece[name]) for part, (_, piece) in zip(parts, pieces, strict=True))


class ByBlocks(ByParameter):
    """Steps over pieces, each by itself, as of ranks with ``partition="block"``. ``rules``: how states are divided."""

    grain, copies = BY_BLOCK, 1
    parts, full = "pieces", "the whole"
    other_bits = "stepping pieces of a parameter of shape {} gave different bits than stepping it whole"

    def __init__(self, inner: UserOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]) -> None:
        super().__init__(inner, groups, parameters)
        self.rules: dict[str, BlockRule] = {}

    def refusal(self, why: str) -> ValueError:
        return ValueError(
            f'{self.inner.name} cannot be cut between blocks: {why}. With partition="block" ranks step pieces of '
            f"parameters, which begin at multiples of {CUT_EVERY:,} elements: that needs a class whose update of an "
            'element depends on nothing beyond a block of consecutive ones: leave out partition=, or use "parameter"'
        )

    def choose(self, parameters: Sequence[ParameterSpec]) -> list[Placed]:
        return [(s, shape) for s in self.settings for shape in sorted(set(map(_throw_away, s.shapes)))]

    def stands_for(self, shape: tuple[int, ...], spec: ParameterSpec) -> bool:
        return shape == _throw_away(spec.shape)

    def compare_states(self, whole: FullParameters, ranks: Sequence[OnRank], large: frozenset[str]) -> None:
        """Raise `ValueError` unless the pieces' states form the whole ones. Notes how."""
        for number in range(len(whole.parameters)):
            state, shape = whole.state(number), whole.parameters[number].shape
            pieces = [(rank, piece) for rank in ranks for piece in rank.pieces if piece.parameter == number]
            found = [(piece.place, rank.state(piece)) for rank, piece in pieces]
            if any(_kinds(dict(piece)) != _kinds(dict(state)) for _, piece in found):
                raise self.refusal("it keeps states of other kinds for pieces than for the whole")
            for name, value in state.items():
                if not _is_known(value):
                    raise self.refusal(f"its state {name!r} is a {type(value).__name__}, which cannot be compared")
                rules = self._rules_of(name, value, [piece[name] for _, piece in found], shape)
                if not _form(name, value, found, shape, rules):
                    raise self.refusal(f"its state {name!r} got another value for pieces than for the whole")
                try:
                    self.rules = merged(self.rules, rules)
                except ValueError as error:
                    raise self.refusal(f"{error} in another param group") from error

    def _rules_of(self, name: str, whole: Any, pieces: Sequence[Any], shape: torch.Size) -> dict[str, BlockRule]:
        """Return how the tensors of a state are divided. Those that are not are equal in all pieces."""
        if not isinstance(whole, Tensor):
            return {}
        inner, _ = flattened(whole)
        if inner:
            found = [
                self._rules_of(f"{name}.{k}", getattr(whole, k), [getattr(p, k) for p in pieces], shape) for k in inner
            ]
            return {key: rule for each in found for key, rule in each.items()}
        if whole.numel() < len(pieces) or whole.numel() != sum(piece.numel() for piece in pieces):
            return {}
        values = pieces[0].numel()
        if values < 2 or CUT_EVERY % values:  # a single value would be saved as a scalar is
            raise self.refusal(f"its state {name!r} has {values} values for {CUT_EVERY:,} elements")
        per, has_its_shape = CUT_EVERY // values, whole.shape == shape
        if per == 1 and not has_its_shape and "." not in name:  # a piece, a vector, would have one of its shape
            raise self.refusal(f"its state {name!r} is as large as the parameter, and has another shape")
        return {name: BlockRule(per, has_its_shape)}


# -- stacks ------------------------------------------------------------------------------------------------------------


def matrices_of(spec: ParameterSpec) -> list[ParameterSpec]:
    """Return the matrices of a stack as parameters, one of each shape; of another parameter the parameter itself."""
    if not spec.grain.stack:
        return [spec]
    shapes = dict.fromkeys(spec.grain.stack)
    return [replace(spec, shape=shape, stride=row_major_stride(shape), grain=WHOLE) for shape in shapes]


def own_states(inner: UserOptimizer, groups: Sequence[Options], stacks: Sequence[ParameterSpec]) -> frozenset[str]:
    """Return the names of the states that differ between blocks: with other gradients, or of other shapes. Others are
    equal in all blocks.

    Raises `ValueError` if the states of the blocks of one parameter cannot be those of the parameter.
    """
    found: set[str] = set()
    for spec in {(spec.group, spec.dtypes, step_device(spec), spec.grain.stack): spec for spec in stacks}.values():
        sizes = iter(shortened(sum(spec.grain.stack, ())))  # of all together: other sizes stay other ones
        short = {block: tuple(next(sizes) for _ in block) for block in spec.grain.stack}
        large = {block: shape for block in short for shape in large_shapes([block])}
        shapes = [*dict.fromkeys((*short.values(), *large.values()))]
        options, (setting,) = distinct(inner.defaults, groups, [spec])
        with random_state_kept([setting]):
            made = FullParameters(inner, options, [(setting, each) for each in shapes for _ in range(2)])
            for step in range(FEW_STEPS):
                made.step([g.flip(0).mul(-3) if n % 2 else g for n, g in enumerate(made.gradients(step))])
        states = {shape: (made.state(2 * n), made.state(2 * n + 1)) for n, shape in enumerate(shapes)}
        kinds = {shape: _kinds(dict(state)) for shape, (state, _) in states.items()}
        if any(kinds[a] != kinds[b] for of in (short, short | large) for a, b in itertools.pairwise(of.values())):
            raise _no_stack(inner, spec, "those of other sizes have states of other kinds")
        for name in dict.fromkeys(itertools.chain(*kinds.values())):
            pairs = {shape: (one[name], other.get(name)) for shape, (one, other) in states.items() if name in one}
            values = {shape: value for shape, (value, _) in pairs.items() if shape in short.values()}
            equal = all(same(*pair) for pair in (*pairs.values(), *itertools.pairwise(values.values())))
            found |= set() if equal else {name}
            why = None if equal else _why_apart([value for value, _ in pairs.values()], values, spec)
            if why is not None:
                raise _no_stack(inner, spec, f"each has its own {name!r}, {why}")
    return frozenset(found)


def _why_apart(values: Sequence[Any], by_shape: Mapping[tuple[int, ...], Any], spec: ParameterSpec) -> str | None:
    """Return why states of blocks, all of one name, cannot be one of the parameter; None if they can.

    ``by_shape``: those of the shortened blocks, by the blocks' shapes.
    """
    odd = next((value for value in values if type(value) is not Tensor or not value.is_contiguous()), None)
    if odd is not None:
        return f"a {type(odd).__name__} that is no plain, row-major tensor"
    if len({None if value.shape == shape else value.shape for shape, value in by_shape.items()}) > 1:
        return "of another shape each"  # or as large as some of the blocks alone
    rows = len(spec.grain.stack) == spec.shape[0] and spec.grain.stack[0] == (1, *spec.shape[1:])
    if rows and any(value.shape == shape[1:] for shape, value in by_shape.items()):  # as those as large as a block have
        return "which together have the parameter's shape"
    return None


def _no_stack(inner: UserOptimizer, spec: ParameterSpec, why: str) -> ValueError:
    return ValueError(
        f"{inner.name} cannot step the blocks of {spec.name!r}: {why}, and the parameter has one state of a name. "
        "Leave out blocks=, or make each block a parameter"
    )
