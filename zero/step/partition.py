"""Which partition a class needs: by elements, where ranks own pieces of parameters, or by parameter, where each
parameter has one owner. By blocks, where pieces are stepped by themselves, is a partition that users ask for. So is
that of a stack, each block of which is stepped by itself, in its shape, and has one owner.

Knows: what the user asked for, and which trials decide. Does not know: who owns what, and how a class is tried.

A class that is not element-wise may be stepped by parameter, if its step of one parameter depends on no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..core.conflicts import CUT_BLOCKS
from ..core.grain import BY_BLOCK, BY_ELEMENT, WHOLE, Shapes
from ..core.layout import ParameterSpec
from ..core.stage import step_device
from ..runtime.flat_states import Options
from .block_trial import cut_in_blocks, matrices_of, own_states
from .classes import UserOptimizers
from .throwaway import ClassFailedError, FullParameters
from .trial import ByElement, ByParameter, Trial, distinct, random_state_kept
from .user_optimizer import NotElementwiseError, UserOptimizer

PARTITIONS = ("element", "parameter", "block")


def choose_partitions(
    user_optimizers: UserOptimizers,
    groups: Sequence[Options],
    parameters: Sequence[ParameterSpec],
    requested: Mapping[int, str | None],
) -> tuple[list[ParameterSpec], list[str], dict[int, frozenset[str]]]:
    """Choose the partition of each param group.

    Args:
        user_optimizers: the classes.
        groups: all param groups.
        parameters: those of the groups in ``requested``.
        requested: of each new group, by its number, the partition that the user asked for; None: what the class needs.

    Returns:
        The parameters with their class and partition; a line for each class that was given one unasked; the names of
        the states that are as large as their parameter, by the number of the class.

    Raises:
        ValueError: no partition, or not the one that was asked for, gives a class's own bits.
    """
    names: dict[int, frozenset[str]] = {}
    found: dict[int, ParameterSpec] = {}  # by their indices
    lines = []
    for number, inner in user_optimizers.used():
        mine = {group: name for group, name in requested.items() if user_optimizers.number(group) == number}
        members = [spec for spec in parameters if spec.group in mine]
        by_parameter = {group for group, name in mine.items() if name in ("parameter", "block")}
        asked = [spec for spec in members if mine[spec.group] == "block"]
        with _explaining_loops(inner, groups, members):
            try:
                names[number] = _check(ByElement, inner, groups, [s for s in members if s.group not in by_parameter])
            except NotElementwiseError as error:
                if "element" in mine.values():
                    raise
                names[number], by_parameter = frozenset(), set(mine)
                lines.append(
                    f"{inner.name} is not element-wise ({error.why}), so each parameter has one owner, which steps it "
                    'whole (partition="parameter")'
                )
            cut, more = cut_in_blocks(inner, groups, asked)
            whole = [s for s in members if s.group in by_parameter and s not in cut]
            names[number] |= more | _check_whole(inner, groups, whole)
        in_blocks = {spec.index for spec in cut}
        for spec in members:
            grain = spec.grain
            if spec.group in by_parameter and not grain.stack:
                grain = BY_BLOCK if spec.index in in_blocks else WHOLE
            found[spec.index] = replace(spec, optimizer_class=number, grain=grain)
    return [found[spec.index] for spec in parameters], lines, names


def check_partitions(requested: Mapping[int, Any], blocks: Mapping[int, Any]) -> dict[int, str | None]:
    """Return the partition of each param group, by its number: that of ``requested``, and "parameter" if it has
    ``blocks``. Raise `ValueError` naming a group whose ``partition`` is none, or excludes its blocks."""
    for number, name in requested.items():
        if name is not None and name not in PARTITIONS:
            raise ValueError(
                'partition must be "element" (ranks own pieces of parameters), "block" (pieces that begin with a block '
                f'of elements) or "parameter" (each parameter has one owner), not {name!r}, as in param group {number}'
            )
        if blocks[number] is not None and name not in (None, "parameter"):
            raise ValueError(CUT_BLOCKS.text(number=number, blocks=blocks[number], partition=name))
    return {number: name if blocks[number] is None else "parameter" for number, name in requested.items()}


def stack_of(spec: ParameterSpec, blocks: Any) -> Shapes:
    """Return the shapes of a parameter's blocks.

    Args:
        spec: the parameter.
        blocks: of its param group: the dimension whose indices are blocks, or the sizes of the blocks along dimension
            0; None: there are none.

    Raises:
        ValueError: these are no blocks, or none of this parameter, or they do not lie in its memory one by one.
    """
    if blocks is None:
        return ()
    shape, where = spec.shape, f"{spec.name!r} of param group {spec.group}, which has blocks={blocks!r},"
    if len(shape) < 2 or not spec.numel:
        raise ValueError(f"{where} has shape {shape}, and is no stack of matrices: put it into another group")
    if not torch.empty_strided(shape, spec.stride, device="meta").is_contiguous():
        raise ValueError(
            f"{where} is not row-major, so its blocks do not lie in its memory one by one: make it .contiguous()"
        )
    if isinstance(blocks, int) and not isinstance(blocks, bool):
        if not -len(shape) <= blocks < len(shape) - 1 or blocks == -1:
            raise ValueError(f"{where} has shape {shape}: blocks= must be one of its first {len(shape) - 1} dimensions")
        place = blocks % len(shape)
        if math.prod(shape[:place]) != 1:
            raise ValueError(
                f"{where} has shape {shape}, so the indices of dimension {place} do not lie in its memory one by one: "
                f"keep it with this dimension first, as of p.movedim({place}, 0).contiguous(), and give blocks=0"
            )
        return (shape[place + 1 :],) * shape[place]
    sizes = list(blocks) if isinstance(blocks, (list, tuple)) else []
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(
            f"blocks= must be a dimension or a list of sizes, not {blocks!r}, as in param group {spec.group}"
        )
    if sum(sizes) != shape[0]:
        raise ValueError(f"{where} has {shape[0]} rows, and the sizes of its blocks add up to {sum(sizes)}")
    return tuple((size, *shape[1:]) for size in sizes)


def check_classes(
    user_optimizers: UserOptimizers, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> dict[int, frozenset[str]]:
    """Raise `ValueError` unless each class gives its own bits in the partition that its ``parameters`` have.

    ``groups``: param groups with other options, which name no class. Returns the names of the states that are as large
    as their parameter, by the number of the class.
    """
    found: dict[int, frozenset[str]] = {}
    for number in sorted({spec.optimizer_class for spec in parameters}):
        inner, mine = user_optimizers[number], [spec for spec in parameters if spec.optimizer_class == number]
        with _explaining_loops(inner, groups, mine):
            blocks = [spec for spec in mine if spec.grain == BY_BLOCK]
            cut, more = cut_in_blocks(inner, groups, blocks)
            if len(cut) < len(blocks):
                lost = next(spec for spec in blocks if spec not in cut)
                raise ValueError(f"{inner.name} steps pieces of {lost.name!r} otherwise with these options")
            found[number] = (
                inner.elementwise
                | more
                | _check(ByElement, inner, groups, [spec for spec in mine if spec.grain == BY_ELEMENT])
                | _check_whole(inner, groups, [spec for spec in mine if spec.grain.owned(spec.shape)])
            )
    return found


def begin_at_zero(inner: UserOptimizer, groups: Sequence[Options], spec: ParameterSpec) -> frozenset[str]:
    """Return the names of the states that are as large as a parameter and 0 before its first step.

    The class takes a step on a throw-away parameter, with a gradient of 0 and without weight decay.
    """
    options, settings = distinct(inner.defaults, groups, [spec])
    options = [{**given, **({"weight_decay": 0.0} if "weight_decay" in given else {})} for given in options]
    with random_state_kept(settings):
        try:
            made = FullParameters(inner, options, [(settings[0], (2, 3)[: max(len(spec.shape), 1)])])
            made.step([torch.zeros_like(made.parameters[0])])
        except ClassFailedError:
            return frozenset()
    large = made.names(of_every_shape=False)
    return frozenset(name for name, value in made.state(0).items() if name in large and not value.count_nonzero())


@contextmanager
def _explaining_loops(
    inner: UserOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
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
            devices = sorted({step_device(spec) for spec in parameters if spec.group == number})
            by_default = options.get("foreach", False) is None and options.get("fused") is None
            if by_default and devices[0] == "cpu" and len(devices) > 1:
                more = ", or fused=True" if "fused" in options else ""
                raise ValueError(
                    f"{error}. Param group {number} is on {' and '.join(devices)}, where torch's default loop depends "
                    "on all its parameters together: name a loop, foreach=False (the default there) or "
                    f"foreach=True{more}"
                ) from error
        raise


def _check(
    partition: type[Trial], inner: UserOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> frozenset[str]:
    """Try a class, unless there are no ``parameters``. Return the names of the states that are as large as their
    parameter. Notes the tensor subclasses among states in ``inner.kinds``."""
    if not parameters:
        return frozenset()
    names, kinds = partition(inner, groups, parameters).run()
    inner.note_kinds(kinds)
    return names


def _check_whole(
    inner: UserOptimizer, groups: Sequence[Options], parameters: Sequence[ParameterSpec]
) -> frozenset[str]:
    """Try a class as `_check` does, on parameters that have one owner, or whose blocks have. Notes of which states each
    block has its own."""
    stacks = [spec for spec in parameters if spec.grain.stack]
    names = _check(ByParameter, inner, groups, [part for spec in parameters for part in matrices_of(spec)])
    if stacks:
        inner.note_per_block(own_states(inner, groups, stacks))
    return names
