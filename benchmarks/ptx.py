"""The arithmetic of a multi-tensor kernel, read from its PTX: a formula for each number that a thread stores.

Such a kernel has two loops. One moves four neighbours at a time, the other, for ragged tensors, single elements. A
thread's first pass through each is followed with given arguments of the kernel and with formulas in place of elements.
The compiler splits the two loops differently by these arguments, so counts over a loop's text would not be comparable.

Knows: PTX. Does not know: compilers, optimizers.
"""

from __future__ import annotations

import operator
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LANES = 4  # elements of a thread in one pass
OPERATIONS = ("fma", "mul", "add", "sub", "div", "sqrt")
_LINE = re.compile(r"^(\$\w+):|^[\s{]*(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\b\s*([^;\n]*);", re.MULTILINE)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+")
_REGISTER = re.compile(r"%\w+(?:\.\w+)?")
_EQUALS = {"eq": operator.eq, "equ": operator.eq, "ne": operator.ne, "neu": operator.ne}
_FLOAT = re.compile(r"\.f(64|32)$")
_NAN = "0f7FFFFFFF"  # a number that is not equal to itself would be a new one each time
_THREAD = "%tid.x"  # what depends on it is an element's


@dataclass(frozen=True, eq=False)
class Formula:
    """An operation and its arguments. ``read``: arrays whose addresses it depends on, and the thread's number."""

    operation: str
    arguments: tuple[Any, ...]
    read: frozenset[str]


Stored = dict[str, list[Any]]  # by array: the four formulas that a thread stores in one pass


@dataclass
class _Pass:
    stored: Stored = field(default_factory=dict)
    vectors: int = 0
    undecided: list[int | None] = field(default_factory=list)  # branches that need more than the kernel's arguments


def kernels(text: str) -> Iterator[tuple[str, str]]:
    """Yield the mangled name and the body of each kernel of a module."""
    for part in text.split(".entry ")[1:]:
        yield part.partition("(")[0].strip(), part[part.index("\n{") : part.index("\n}")]


def counted(stored: Stored) -> dict[str, int]:
    """Return how many operations a pass makes of its four elements. What is the same for all elements is left out.

    ``fusable``: sums and differences of a product, of which the assembler may make an ``fma``. PTX leaves that open.
    """
    found = Counter[str]()
    for lane in range(LANES):
        seen, todo = set[Formula](), [lanes[lane] for lanes in stored.values()]
        while todo:
            each = todo.pop()
            if isinstance(each, Formula) and _THREAD in each.read and each not in seen:
                seen.add(each)
                todo += each.arguments
        found.update(each.operation.partition(".")[0] for each in seen)
        sums = [each for each in seen if each.operation in ("add", "sub")]
        found["fusable"] += sum(any(isinstance(a, Formula) and a.operation == "mul" for a in s.arguments) for s in sums)
    return {name: found[name] for name in (*OPERATIONS, "fusable")}


def differing(vectorised: Stored, ragged: Stored) -> str:
    """Return where elements have other arithmetic: nowhere (""), within a loop, or between the loops."""
    if any(len(set(lanes)) > 1 for loop in (vectorised, ragged) for lanes in loop.values()):
        return "within a loop"
    return "" if vectorised == ragged else "between the loops"


class Loops:
    """The two loops of a kernel. Equal formulas of one `Loops` are one object."""

    def __init__(self, body: str) -> None:
        self._known: dict[tuple[Any, ...], Formula] = {}
        self._code: list[tuple[bool, str, str, list[str]]] = []
        self._labels: dict[str, int] = {}
        for label, negated, guard, name, operands in _LINE.findall(body):
            if label:
                self._labels[label] = len(self._code)
            else:
                self._code.append((bool(negated), guard, name, _OPERAND.findall(operands)))

    def stored(self, arguments: Mapping[int, float]) -> tuple[Stored, Stored]:
        """Return what the vectorised loop and the ragged one store.

        ``arguments``: the kernel's arguments by position. One that is left out is a null pointer, a flag that is off,
        or a number unlike all others.
        """
        found: dict[bool, Stored] = {}
        branches: list[int | None] = [None]
        while branches and len(found) < 2:
            branch = branches.pop(0)
            each = self._follow(arguments, branch)
            if branch is None:
                branches += each.undecided
            if each.stored and all(len(lanes) == LANES for lanes in each.stored.values()):
                found.setdefault(each.vectors > 0, each.stored)
        if len(found) < 2:
            raise ValueError("this kernel has no vectorised and ragged loop that can be followed")
        return found[True], found[False]

    def _follow(self, arguments: Mapping[int, float], taken: int | None) -> _Pass:
        """Follow a thread once. It takes no undecided branch but ``taken``, so its elements are in range."""
        values: dict[str, Any] = {}
        found, seen, at = _Pass(), set[int](), 0
        while at < len(self._code) and at not in seen:
            seen.add(at)
            here, (negated, guard, name, operands) = at, self._code[at]
            at += 1
            condition = values.get(guard) if guard else not negated
            if not isinstance(condition, bool):
                found.undecided.append(here)
                condition = (here == taken) != negated
            if condition == negated:
                continue
            if name == "ret":
                break
            if name.startswith("bra"):
                at = self._labels[operands[0]]
            elif name.startswith("st.global"):
                (array,) = self._value(operands[0], values).read - {_THREAD}
                found.vectors += ".v" in name
                found.stored.setdefault(array, []).extend(values[each] for each in _REGISTER.findall(operands[1]))
            else:
                result = self._result(name, operands[1:], values, arguments)
                values |= dict.fromkeys(_REGISTER.findall(operands[0]), result)
        return found

    def _value(self, operand: str, values: Mapping[str, Any]) -> Any:
        registers = _REGISTER.findall(operand)
        if registers and registers[-1] in values:  # of {0, %rs1} the register: a bf16 number in the upper half
            return values[registers[-1]]
        if operand.startswith("0f") and operand != _NAN:
            return struct.unpack(">f", bytes.fromhex(operand[2:]))[0]
        if re.fullmatch(r"-?\d+", operand):
            return int(operand)
        return self._of(operand, (), {operand} & {_THREAD})

    def _result(self, name: str, operands: list[str], values: Mapping[str, Any], arguments: Mapping[int, float]) -> Any:
        kind, *modes = name.split(".")
        given = [self._value(each, values) for each in operands]
        if name.startswith("ld.param"):
            argument = re.search(r"_param_(\d+)\]$", operands[0])
            if argument is None:  # a field of the lists of tensors: of 64 bits, an address or a number of elements
                return self._of(operands[0], (), operands if name.endswith("64") else ())
            position = int(argument[1])
            return arguments.get(position, 0.5 + position / 1024 if _FLOAT.search(name) else 0)
        if kind == "setp" and modes[0] in _EQUALS and all(isinstance(each, int | float) for each in given):
            return bool(_EQUALS[modes[0]](*given))
        if kind == "not" and isinstance(given[0], bool):
            return not given[0]
        if kind == "selp" and isinstance(given[2], bool):
            return given[0] if given[2] else given[1]
        if kind in ("mov", "cvta") or (kind == "cvt" and isinstance(given[0], int | float)):
            return given[0]
        if kind == "ld":
            read = _read(given)
            return self._of("element", (), read) if _THREAD in read else self._of(name, tuple(given))
        return self._of(".".join([kind, *modes[:-1]]), tuple(given))

    def _of(self, operation: str, arguments: tuple[Any, ...] = (), read: Iterable[str] = ()) -> Formula:
        made = Formula(operation, arguments, _read(arguments).union(read))
        return self._known.setdefault((operation, arguments, made.read), made)


def _read(arguments: Iterable[Any]) -> frozenset[str]:
    return frozenset[str]().union(*(each.read for each in arguments if isinstance(each, Formula)))
