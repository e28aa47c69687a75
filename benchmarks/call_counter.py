"""Counts the calls of a system's own Python functions, by the event of a step that causes them.

    parameter      a gradient is ready, a placeholder is asked, a released parameter is used
    saved tensor   autograd saves a tensor in a forward, or needs it in a backward
    unit           a module's hook: gather, install, release
    bucket         a reduction or a gather is launched or waited for; the states of a bucket are stepped
    step           everything else: once in a backward, a clip or a step

The event of a call is that of the innermost function under way that `EVENTS` names. A comprehension is a call in Python
3.11, and so is each time that a generator goes on; both are counted, and also apart.

Knows: the interpreter's profiling hook. Does not know: models, ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

PARAMETER, SAVED, UNIT, BUCKET, STEP = "parameter", "saved tensor", "unit", "bucket", "step"
ORDER = (PARAMETER, SAVED, UNIT, BUCKET, STEP)

# The beginning of module:function -> the event. The longest one counts.
EVENTS = {
    "zero.gradients.hooks:_Arrival.__call__": PARAMETER,
    "zero.gradients.placeholder:ShardedGradient": PARAMETER,
    "zero.gradients.hooks:GradientHooks": STEP,
    "zero.parameters.released:": PARAMETER,
    "zero.parameters.gathered.saved_tensor_hooks:SavedTensorHooks._hooks": SAVED,
    "zero.parameters.module_hooks:": UNIT,
    "zero.parameters.unit_hooks:": UNIT,
    "zero.parameters.thread_frames:": UNIT,
    "zero.parameters.unit_manager:": UNIT,
    "zero.parameters.unit_manager:UnitManager.diagnose": STEP,
    "zero.parameters.unit_manager:UnitManager.changed": STEP,
    "zero.parameters.resident_units:ResidentUnits.announce": STEP,
    "zero.runtime.accumulator:GradAccumulator.flush": BUCKET,
    "zero.runtime.accumulator:GradAccumulator.launch": BUCKET,
    "zero.runtime.accumulator:GradAccumulator.divide": BUCKET,
    "zero.runtime.accumulator:GradAccumulator.gather_means": BUCKET,
    "zero.runtime.events:WaitedInStages.wait": BUCKET,
    "zero.step.inner:_step": BUCKET,
    "zero.runtime.flat_states:": BUCKET,
    "zero.step.update:Update._gather": BUCKET,
    "collectives.queue:": BUCKET,
    "torch.distributed.fsdp._fully_shard._fsdp_param:": PARAMETER,
    "torch.distributed.fsdp._fully_shard._fsdp_state:": UNIT,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:": UNIT,
    "torch.distributed.tensor.": PARAMETER,
}
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


class _Known(NamedTuple):
    """What the counter knows of a function. ``name``: module:function, empty if it is not counted."""

    name: str
    event: str | None
    kind: str


class CallCounter:
    """Calls of the functions that are defined in some packages, in the thread that counts.

    ``calls``: number of calls by (event, kind, module:function), where the kind is "function", "comprehension" or
    "generator".
    """

    def __init__(self, packages: Sequence[str], without: Sequence[str] = ()) -> None:
        """``packages``: whose functions are counted; ``without``: packages in these that are left out."""
        self._packages, self._without = tuple(packages), tuple(without)
        self._known: dict[CodeType, _Known] = {}
        self._events: list[str] = []
        self.calls: Counter[tuple[str, str, str]] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the block."""
        self._events = [STEP]
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _hook(self, frame: FrameType, what: str, _: Any) -> None:
        if what == "call":
            known = self._known.get(frame.f_code) or self._learn(frame)
            event = known.event or self._events[-1]
            self._events.append(event)
            if known.name:
                self.calls[event, known.kind, known.name] += 1
        elif what == "return" and len(self._events) > 1:  # not of the frame that began to count
            self._events.pop()

    def _learn(self, frame: FrameType) -> _Known:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        qualified: Any = code  # `co_qualname` is new in Python 3.11
        name = f"{module}:{qualified.co_qualname}"
        found = max((begin for begin in EVENTS if name.startswith(begin)), key=len, default=None)
        ours = _is_in(module, self._packages) and not _is_in(module, self._without)
        generates = bool(code.co_flags & inspect.CO_GENERATOR)
        kind = "generator" if generates else "comprehension" if code.co_name in _COMPREHENSIONS else "function"
        known = _Known(name if ours else "", None if found is None else EVENTS[found], kind)
        self._known[code] = known
        return known


def _is_in(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
