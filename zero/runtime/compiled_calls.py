"""Functions that keep the calls and the hooks of this library out of the graphs that torch's compiler traces.

Knows: Dynamo, and the compiled call of a module. Does not know: units, memory or ranks.

    module.compile()                       the compiled call runs between the hooks; its graph is as without them
    a compiled call around such a module   no hook is traced: a graph break surrounds each hook
    a compiled call around a public call   the call is not traced: a graph break surrounds it
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from collectives.torch_internals import (
    DEFAULT_FRAME,
    SKIP_FRAME,
    FrameExecStrategy,
    get_eval_frame_callback,
    missing,
    set_code_exec_strategy,
)

_Call = Callable[..., Any]
_Function = TypeVar("_Function", bound=_Call)
_Class = TypeVar("_Class", bound=type)
_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")


def _untraced(function: _Function, below: Any) -> _Function:
    absent: _Function | None = missing(set_code_exec_strategy, FrameExecStrategy, SKIP_FRAME, DEFAULT_FRAME)
    if absent is not None:
        return absent  # raises when it is called
    own: FunctionType = inspect.unwrap(function)  # that of the wrapper is shared by all that it wraps
    set_code_exec_strategy(own.__code__, FrameExecStrategy(SKIP_FRAME, below))
    vars(function)["_torchdynamo_disable"] = True  # nor inline it
    return function


def untraced(function: _Function) -> _Function:
    """Make Dynamo trace neither ``function`` nor its callees, as `torch.compiler.disable` does; a decorator.

    Unlike that, it costs nothing if nothing is compiled. Calls inside ``function`` that are compiled stay compiled.
    """
    return _untraced(function, SKIP_FRAME)


def untraced_context(
    function: Callable[_Arguments, Iterator[_Value]],
) -> Callable[_Arguments, AbstractContextManager[_Value]]:
    """Make a context of a generator, as `contextlib.contextmanager` does, whose ends Dynamo does not trace."""
    return untraced(contextmanager(function))


def untraced_methods(cls: _Class) -> _Class:
    """Make Dynamo trace no method and no property of a class's own body; a decorator."""
    for member in vars(cls).values():
        plain = getattr(member, "__func__", member)  # a class method and a static method have one
        for function in (member.fget, member.fset, member.fdel) if isinstance(member, property) else (plain,):
            if isinstance(function, FunctionType):
                untraced(function)
    return cls


def interrupting(function: _Function) -> _Function:
    """Make Dynamo not trace ``function``, which then may call `inside_compiled_call`; a decorator.

    Other functions that it calls have to be `untraced`.
    """
    return _untraced(function, DEFAULT_FRAME)


@interrupting
def inside_compiled_call() -> bool:
    """Return True if the calling function, which must be an `interrupting` one, has broken a graph."""
    return get_eval_frame_callback() is not None


def wrap_compiled_call(
    call: Callable[..., Any], before: Callable[[], bool], after: Callable[[bool, Any], None]
) -> Callable[..., Any]:
    """Return a function that calls ``before``, the compiled ``call`` and ``after``, outside of any graph.

    ``after`` always runs. Its arguments are the results of ``before`` and ``call``; False and None if these raised.
    """

    @untraced
    def run(*args: Any, **kwargs: Any) -> Any:
        prepared, output = False, None
        try:
            prepared = before()
            output = call(*args, **kwargs)
        finally:
            after(prepared, output)
        return output

    return run


class NotScriptable:
    """The base of hooks that torch.jit, which reads the name of every hook, cannot compile."""

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit cannot take a module with the hooks of a stage-3 optimizer, or a copy of one: script it before "
            "the optimizer is built, or after its close()"
        )
