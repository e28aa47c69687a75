"""Mixed precision: the dtypes of a model, or of each of its modules, and the borders at which tensors are cast.

Knows: what a user may pass as ``mixed_precision``, and modules. Does not know: ranks, memory, hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from .core.conflicts import BY_MODULE
from .core.layout import Dtypes
from .core.parameter_specs import FLOATS, call_given, child_name, named_children
from .core.rounding import rounded
from .core.units import Ignored, callable_children, has_forward


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of the model's compute, of the gradients that are sent, and of their sums, named as in FSDP.

    The parameters become 16-bit tensors. The owner of an element keeps a master weight of it, in fp32 (fp64 for an fp64
    parameter). ``p.grad`` is a placeholder even at stage 0: see `zero.ZeroOptimizer.full_grad`.

    ``ZeroOptimizer(mixed_precision=...)`` takes one for the whole model, or one for each module, so that norms, routers
    and heads stay in fp32: a mapping from patterns of modules' names (as in `fnmatch`) to these, or a function that is
    called with the name of each module and the module, and returns one. Of the patterns that match a module, or a
    module around it, the last one decides. A parameter has the precision of the module that holds it. A module casts
    its inputs and outputs if its precision is not that of the module around it; the outermost one always does. In the
    place of any of them a ``MixedPrecisionPolicy`` of FSDP2 may stand, which means the same.

    Args:
        param_dtype: dtype of the parameters in the forward and the backward, and of their gradients. None: each keeps
            the dtype that it was made in, and its gradients too, as without mixed precision.
        reduce_dtype: dtype of the gradients that a rank sends to an element's owner. None: ``param_dtype``.
        accumulate_dtype: dtype in which the owner adds them up: ``reduce_dtype`` itself, or a wider one. 16 bits halve
            a gradient's memory, but lose addends that are small relative to the sum.
        buffer_dtype: dtype of the module's floating-point buffers. None: they keep their own.
        cast_forward_inputs: cast the floating-point inputs of the module's forward to ``param_dtype``, if it has one.
        output_dtype: dtype to which the floating-point outputs of the module's forward are cast. None: they are not.

    Raises:
        TypeError: a dtype is not fp32, bf16 or fp16 (for buffers, fp64 is allowed, too).
        ValueError: ``accumulate_dtype`` is neither ``reduce_dtype`` nor wider, or ``reduce_dtype`` is given without
            ``param_dtype``.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("param_dtype", (None, *FLOATS[1:])),
            ("reduce_dtype", (None, *FLOATS[1:])),
            ("accumulate_dtype", FLOATS[1:]),
            ("buffer_dtype", (None, *FLOATS)),
            ("output_dtype", (None, *FLOATS[1:])),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise TypeError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")
        if self.param_dtype is None:
            if self.reduce_dtype is not None or self.accumulate_dtype is not torch.float32:
                raise ValueError(
                    "reduce_dtype and accumulate_dtype need a param_dtype: without it gradients are sent and added up "
                    "in the dtype in which each parameter was made"
                )
            return
        travel = self.travel(self.param_dtype)
        wider = self.accumulate_dtype.itemsize > travel.itemsize
        if self.accumulate_dtype is not travel and not wider:
            raise ValueError(
                f"accumulate_dtype {self.accumulate_dtype} must be {travel}, in which contributions travel "
                "(reduce_dtype), or wider: a sum would lose more than its parts"
            )

    def travel(self, param_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which contributions of parameters in ``param_dtype`` travel. Internal."""
        return param_dtype if self.reduce_dtype is None else self.reduce_dtype

    def of(self, dtype: torch.dtype) -> Dtypes:
        """Return the dtypes of a parameter that the user made in ``dtype`` and that the optimizer updates. Internal."""
        if self.param_dtype is None:
            return Dtypes.all(dtype)
        master = dtype if dtype.itemsize >= 4 else torch.float32
        return Dtypes(self.param_dtype, self.travel(self.param_dtype), self.accumulate_dtype, master)

    def unlisted(self, dtype: torch.dtype) -> Dtypes:
        """Return the dtypes of a parameter that the optimizer does not update. Internal."""
        return Dtypes.all(dtype if self.param_dtype is None else self.param_dtype)


class Policy(Protocol):
    """What `MixedPrecision` and the ``MixedPrecisionPolicy`` of FSDP2 have in common: see `MixedPrecision`."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...

    @property
    def reduce_dtype(self) -> torch.dtype | None: ...

    @property
    def output_dtype(self) -> torch.dtype | None: ...

    @property
    def cast_forward_inputs(self) -> bool: ...


@dataclass(frozen=True)
class Patterns:
    """Patterns of modules' names, as of `fnmatch`, and the precision of what each matches. Internal."""

    pairs: tuple[tuple[str, MixedPrecision], ...]

    def decides(self, name: str) -> tuple[str, MixedPrecision]:
        """Return the last pattern that matches a module's name, or that of a module around it, and its precision.

        Raises `ValueError` if there is none.
        """
        parts = name.split(".") if name else []
        around = ["", *(".".join(parts[: count + 1]) for count in range(len(parts)))]
        for pattern, precision in reversed(self.pairs):
            if any(fnmatchcase(each, pattern) for each in around):
                return pattern, precision
        raise ValueError(f"mixed_precision: no pattern matches {_shown(name)}: put '*' first, for all modules")

    def check_used(self, used: Container[str], what: str) -> None:
        """Raise `ValueError` if a pattern is not among ``used``: it decides about no ``what``."""
        for pattern, _ in self.pairs:
            if pattern not in used:
                raise ValueError(
                    f"mixed_precision: the pattern {pattern!r} decides about no {what}: correct it, or move it behind "
                    f"those that match the same ones, since the last one that matches decides"
                )


PrecisionOption: TypeAlias = Policy | Mapping[str, Policy] | Patterns | Callable[[str, nn.Module], Policy] | None
"""What a user may give as ``mixed_precision``; patterns as a mapping."""
Rule: TypeAlias = MixedPrecision | Patterns | Callable[[str, nn.Module], Any] | None
"""The same when it is checked. Results of a function are checked as it is called."""

PrecisionName = Literal["fp32", "bf16", "fp16"]
PRECISIONS: Mapping[str, MixedPrecision | None] = MappingProxyType(
    {"fp32": None, "bf16": MixedPrecision(torch.bfloat16), "fp16": MixedPrecision(torch.float16)}
)
"""The precisions that have a name on a command line, of a model that was made in fp32."""


def checked(option: Any) -> Rule:
    """Return what a user gave as ``mixed_precision``, with policies of FSDP2 converted.

    Raises `TypeError` or `ValueError` if it is none of the possible things.
    """
    if option is None:
        return None
    if isinstance(option, Mapping):
        for pattern in option:
            if not isinstance(pattern, str):
                raise TypeError(f"mixed_precision: a pattern must be a name of modules, not {pattern!r}")
        pairs = ((pattern, _one(given, f"mixed_precision[{pattern!r}]")) for pattern, given in option.items())
        return Patterns(tuple(pairs))
    if isinstance(option, Patterns):
        return option
    if callable(option) and not isinstance(option, type):
        return option  # type: ignore[no-any-return]
    return _one(option, "mixed_precision")


def _one(given: Any, where: str) -> MixedPrecision:
    """Return the precision that a user gave for one module. ``where``: the place of it, for errors."""
    if isinstance(given, MixedPrecision):
        return given
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has a policy has imported it
    if fsdp is None or not isinstance(given, fsdp.MixedPrecisionPolicy):
        meant = PRECISIONS.get(given) if isinstance(given, str) else None
        raise TypeError(
            f"{where} must be a zero.MixedPrecision, not {given!r} (for a whole model also a mapping from patterns of "
            "names of modules, or a function of a name and a module; everywhere also a MixedPrecisionPolicy of FSDP2)"
            f": give zero.MixedPrecision({torch.bfloat16 if meant is None else meant.param_dtype})"
        )
    known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    for field in fields(given):
        if field.name not in known and getattr(given, field.name) != field.default:
            raise ValueError(f"{where}: {field.name} of a MixedPrecisionPolicy is not supported: leave it out")
    return MixedPrecision(**{name: getattr(given, name) for name in known})


def _shown(name: str) -> str:
    return repr(name) if name else "the outermost module"


@dataclass(frozen=True, eq=False)
class Border:
    """A module that casts its inputs and outputs: the outermost one, or one of another precision than around it."""

    name: str
    module: nn.Module
    precision: MixedPrecision


class Precisions:
    """The precision of each module, and so of each parameter: a parameter has that of the module that holds it.

    Attributes:
        lines: facts on which all ranks must agree, as text.
    """

    lines: list[str]
    inside = False  # whether the outermost modules inside of the module are borders, too

    def __init__(
        self, rule: Rule, module: nn.Module | None, ignored: Ignored | None = None, *, rounds: bool = False
    ) -> None:
        """``module``: that of the optimizer, if it has one; ``ignored``: what keeps its dtypes, is asked for no
        precision and is no border; ``rounds``: whether what is in bf16 is rounded. Raises as `resolve` does."""
        self._rule, self._module, self._rounds, self._seen = rule, module, rounds, dict[int, MixedPrecision]()
        self._ignored = Ignored() if ignored is None else ignored
        self._from_fp64 = set[Tensor]()  # parameters that were cast from fp64 while they were not listed
        self.resolve()

    def resolve(self) -> None:
        """Ask for the precision of each module.

        Raises:
            ValueError: modules cannot be asked, a pattern matches none, no pattern matches a module, or modules that
                share a parameter want it in different dtypes.
            TypeError: a function returned no precision.
        """
        self._borders, self._of_parameters = dict[int, Border](), dict[int, tuple[str, MixedPrecision]]()
        self._buffers: list[tuple[Callable[[], Iterator[Tensor]], torch.dtype | None]] = []
        if (rule := self._rule) is None or isinstance(rule, MixedPrecision):
            self._outermost, self.lines = rule, [f"precision {rule}"]
            if rule is not None and self._module is not None:
                self._borders[id(self._module)] = Border("", self._module, rule)
                self._buffers = [(self._module.buffers, rule.buffer_dtype)]
            return
        if self._module is None:
            raise ValueError(BY_MODULE.text())
        self._used, self._seen, self.lines = set[str](), dict[int, MixedPrecision](), []
        self._outermost = self._visit(self._module, "", None, None)
        if isinstance(rule, Patterns):
            rule.check_used(self._used, "module")

    def resolve_again(self) -> None:
        """Do as `resolve`, for parameters that are added. Also raises `ValueError` if these no longer keep dtypes. The
        caller puts back the attributes, all of which are new objects, if it raises, or if another rank does."""
        kept = self.keeps_dtypes
        self.resolve()
        if kept and not self.keeps_dtypes:  # p.grad would show the means of some parameters alone
            raise ValueError(
                "mixed_precision: modules of the new param group compute in other dtypes than they were made in, and "
                "none did when the optimizer was built: build it when they are there, or let them keep their dtypes"
            )

    def _visit(
        self, module: nn.Module, name: str, above: MixedPrecision | None, around: MixedPrecision | None
    ) -> MixedPrecision:
        """Ask for a module and those inside it. ``above``: the precision of the module that holds it; ``around``: of
        the innermost one with a forward."""
        known = self._seen.get(id(module))
        found = self._seen[id(module)] = self._ask(name, module) if known is None else known
        computes = has_forward(module)
        if computes and found != around:
            self._borders.setdefault(id(module), Border(name, module, found))
        if known is not None:
            for below, child in () if computes else self._inside(module, name):  # they have another module around them
                self._visit(child, below, found, around)
            return found
        if found != above:
            self.lines.append(f"precision of {_shown(name)}: {found}")
        self._buffers.append((lambda: module.buffers(recurse=False), found.buffer_dtype))
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in self._ignored:
                self._claim(parameter, child_name(name, key), found)
        for below, child in self._inside(module, name):
            self._visit(child, below, found, found if computes else around)
        return found

    def _inside(self, module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        return (entry for entry in named_children(module, name) if not self._ignored.has_module(entry[1]))

    def _ask(self, name: str, module: nn.Module) -> MixedPrecision:
        if isinstance(self._rule, Patterns):
            pattern, found = self._rule.decides(name)
            self._used.add(pattern)
            return found
        assert callable(self._rule)
        given = call_given("mixed_precision", self._rule, _shown(name), name, module)
        if given is None:
            raise TypeError(
                f"mixed_precision returned None for {_shown(name)}: return a zero.MixedPrecision for each module; "
                "MixedPrecision(torch.float32) keeps fp32"
            )
        return _one(given, f"what mixed_precision returns for {_shown(name)}")

    def _claim(self, parameter: Tensor, name: str, precision: MixedPrecision) -> None:
        """Note the precision of a parameter. Raises `ValueError` if it has another one under another name."""
        first, known = self._of_parameters.setdefault(id(parameter), (name, precision))
        _check_tied(first, known.of(parameter.dtype), name, precision.of(parameter.dtype))

    def _for(self, parameter: Tensor) -> MixedPrecision | None:
        """Return the precision of a parameter. One that no module holds has that of the outermost one."""
        return self._of_parameters.get(id(parameter), ("", self._outermost))[1]

    @property
    def borders(self) -> list[Border]:
        """The modules at whose forwards tensors are cast, the outermost one first."""
        found = dict(self._borders)
        if self.inside and self._module is not None and self._outermost is not None:
            for name, child in callable_children(self._module, "", True, self._ignored):
                found.setdefault(id(child), Border(name, child, self._seen.get(id(child), self._outermost)))
        return list(found.values())

    def of(self, parameter: Tensor) -> Dtypes:
        """Return the dtypes of a parameter that the optimizer updates, and has not cast for that yet."""
        found, dtype = self._for(parameter), parameter.dtype
        dtype = torch.float64 if found and found.param_dtype is dtype and parameter in self._from_fp64 else dtype
        dtypes = Dtypes.all(dtype) if found is None else found.of(dtype)
        return rounded(dtypes) if self._rounds else dtypes

    def unlisted(self, parameter: Tensor) -> Dtypes:
        """Return the dtypes of a parameter that the optimizer does not update."""
        found = self._for(parameter)
        if parameter.dtype is torch.float64:
            self._from_fp64.add(parameter)
        return Dtypes.all(parameter.dtype) if found is None else found.unlisted(parameter.dtype)

    def buffers(self) -> Iterator[tuple[Tensor, torch.dtype]]:
        """Yield the buffers of the module that are cast, with their dtypes."""
        for of_module, dtype in self._buffers:
            if dtype is not None:
                yield from ((buffer, dtype) for buffer in of_module() if buffer not in self._ignored)

    @property
    def keeps_dtypes(self) -> bool:
        """Whether every parameter keeps the dtype that it was made in, which its mean gradient then has, too."""
        asked = [self._outermost, *(precision for _, precision in self._of_parameters.values())]
        return all(precision is None or precision.param_dtype is None for precision in asked)


def dtypes_by_name(rule: Rule, names: Sequence[Sequence[str]], made_in: torch.dtype) -> list[Dtypes]:
    """Return the dtypes of parameters that the optimizer updates, of which only names are known.

    Args:
        rule: no function, which needs modules.
        names: the names of each parameter, ties included.
        made_in: the dtype in which the user made them.

    Raises:
        ValueError: no pattern matches a parameter's module, or tied modules want different dtypes, or a pattern decides
            about no parameter.
    """
    if not isinstance(rule, Patterns):
        assert rule is None or isinstance(rule, MixedPrecision)
        return [Dtypes.all(made_in) if rule is None else rule.of(made_in)] * len(names)
    used, found = set[str](), []
    for of_one in names:
        decided = [(name, *rule.decides(name.rpartition(".")[0])) for name in of_one]
        for name, pattern, precision in decided:
            used.add(pattern)
            _check_tied(decided[0][0], decided[0][2].of(made_in), name, precision.of(made_in))
        found.append(decided[0][2].of(made_in))
    rule.check_used(used, "parameter")
    return found


def _check_tied(first: str, theirs: Dtypes, name: str, mine: Dtypes) -> None:
    """Raise `ValueError` if a parameter has other dtypes under another name."""
    if mine != theirs:
        raise ValueError(
            f"{first!r} and {name!r} are one parameter, but mixed_precision wants {theirs.param_dtype} (sent in "
            f"{theirs.reduce_dtype}) for the first and {mine.param_dtype} (sent in {mine.reduce_dtype}) for the "
            "second: give both modules the same dtypes"
        )
