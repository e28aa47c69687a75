"""Which partition a class needs: by elements, where ranks own pieces of parameters, or by parameter, where each
parameter has one owner. By blocks, where pieces are stepped by themselves, is a partition that users ask for.

Knows: what the user asked for, and which trials decide. Does not know: who owns what, and how a class is tried.

A class that is not element-wise may be stepped by parameter, if its step of one parameter depends on no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..core.layout import ParameterSpec
from ..core.stage import step_device
from ..runtime.flat_states import Options
from .block_trial import cut_in_blocks
from .classes import UserOptimizers
from .trial import ByElement, ByParameter, Trial
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
    found: dict[int, tuple[int, bool]] = {}  # class of each new group, and whether it is partitioned by elements
    in_blocks: set[int] = set()  # indices of the parameters that are cut between blocks
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
            names[number] |= more | _check(ByParameter, inner, groups, whole)
        in_blocks |= {spec.index for spec in cut}
        found |= {group: (number, group in by_parameter) for group in mine}
    chosen = [found[spec.group] for spec in parameters]
    described = [
        replace(
            spec,
            optimizer_class=number,
            one_owner=by_parameter and spec.index not in in_blocks,
            blocks=spec.index in in_blocks,
        )
        for spec, (number, by_parameter) in zip(parameters, chosen, strict=True)
    ]
    return described, lines, names


def check_partitions(requested: Mapping[int, Any]) -> None:
    """Raise `ValueError` naming a param group whose ``partition`` is none. ``requested``: as in `choose_partitions`."""
    for number, name in requested.items():
        if name is not None and name not in PARTITIONS:
            raise ValueError(
                'partition must be "element" (ranks own pieces of parameters), "block" (pieces that begin with a block '
                f'of elements) or "parameter" (each parameter has one owner), not {name!r}, as in param group {number}'
            )


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
            blocks = [spec for spec in mine if spec.blocks]
            cut, more = cut_in_blocks(inner, groups, blocks)
            if len(cut) < len(blocks):
                lost = next(spec for spec in blocks if spec not in cut)
                raise ValueError(f"{inner.name} steps pieces of {lost.name!r} otherwise with these options")
            found[number] = (
                inner.elementwise
                | more
                | _check(ByElement, inner, groups, [spec for spec in mine if not spec.alone])
                | _check(ByParameter, inner, groups, [spec for spec in mine if spec.one_owner])
            )
    return found


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
