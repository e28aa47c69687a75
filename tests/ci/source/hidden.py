"""Processes whose torch lacks private names of `collectives.torch_internals`.

``python -m tests.ci.source.hidden all PATH...`` hides every name before the library is imported, and uses each from the
module.
``python -m tests.ci.source.hidden each PATH...`` forks a process for each name before the library is imported, hides
the name there, and trains at a stage that uses it. Both print the error of each name, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from enum import Enum
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.support.forks import Child


class _Gone:
    """A descriptor that makes a class attribute seem absent, even an inherited one."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("hidden")


class _Without:
    """A proxy for an object that lacks one attribute."""

    def __init__(self, whole: object, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError("hidden")
        return getattr(self._whole, name)


def hide(path: str) -> Callable[[], None]:
    """Make torch lack the name ``path``. Return a function that restores it."""
    module, _, attributes = path.partition(":")
    *parents, name = attributes.split(".")
    owner = resolve_name(f"{module}:{'.'.join(parents)}")
    if isinstance(owner, ModuleType):
        found = getattr(owner, name)
        delattr(owner, name)
    elif isinstance(owner, type) and not issubclass(owner, Enum):
        inherited, found = name not in vars(owner), vars(owner).get(name)
        setattr(owner, name, _Gone())
        if inherited:
            return lambda: delattr(owner, name)
    else:
        found, name, owner = owner, parents[-1], resolve_name(f"{module}:{'.'.join(parents[:-1])}")
        setattr(owner, name, _Without(found, attributes.split(".")[-1]))
    assert is_hidden(path), path
    return lambda: setattr(owner, name, found)


def is_hidden(path: str) -> bool:
    try:
        resolve_name(path)
    except AttributeError:
        return True
    return False


NEEDED_AT: dict[str, int] = {
    "torch:_C._storage_Use_Count": 2,
    "torch:_C._current_graph_task_id": 2,
    "torch.autograd:Variable._execution_engine.queue_callback": 2,
    "torch.autograd.graph:_engine_run_backward": 2,
    "torch:Tensor._make_wrapper_subclass": 2,
    "torch._C._dynamo.eval_frame:set_code_exec_strategy": 2,
    "torch._C._dynamo.eval_frame:_FrameExecStrategy": 2,
    "torch._C._dynamo.eval_frame:_FrameAction.SKIP": 2,
    "torch._C._dynamo.eval_frame:_FrameAction.DEFAULT": 2,
    "torch:_C._functorch.get_interpreter_stack": 3,
    "torch._C._dynamo.eval_frame:get_eval_frame_callback": 3,
}
"""The names that each training at a stage calls."""

COMPARED_AT: dict[str, int] = {
    "torch:_has_compatible_shallow_copy_type": 3,
    "torch:ops.aten._foreach_zero_.default": 2,
    "torch:ops.aten._amp_foreach_non_finite_check_and_unscale_.default": 2,
}
"""The names with which something is compared: all goes on without them."""


def train(stage: int) -> None:
    from zero import ZeroOptimizer

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def error_of(action: Callable[[], Any]) -> str:
    """Return the type and text of an action's error, or an empty string if it succeeds."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_at_once(paths: list[str]) -> dict[str, list[str]]:
    """Hide all names. Return for each name the errors of a call, of an attribute and of ``isinstance``."""
    for path in paths:
        if not is_hidden(path):
            hide(path)
    import zero  # noqa: F401
    from collectives import torch_internals

    found = {}
    for value in vars(torch_internals).values():
        if torch_internals.missing(value) is not None:
            uses = (lambda v=value: v(1), lambda v=value: v.__code__, lambda v=value: isinstance(1, v))
            errors = [error_of(use) for use in uses]
            named = next(path for path in paths if f" has no {path.replace(':', '.')}, " in errors[0])
            found[named] = errors
    return found


def one(path: str) -> str:
    """Hide a name, import the library, restore the name for torch, and return the error of a training."""
    give_back = hide(path)
    import zero  # noqa: F401

    give_back()
    return error_of(lambda: train({**NEEDED_AT, **COMPARED_AT}[path]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, *given = sys.argv[1:]
    assert not {"zero", "collectives"} & {name.partition(".")[0] for name in sys.modules}
    if mode == "all":
        print(json.dumps(all_at_once(given)))
    else:
        importlib.import_module("torch._dynamo")  # once, before the forks: the first optimizer of each would import it
        print(json.dumps({path: Child(lambda path=path: one(path)).said() for path in given}))  # type: ignore[misc]
