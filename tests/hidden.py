"""Processes whose torch lacks private names of `collectives.torch_internals`.

``python -m tests.hidden all PATH...`` hides every name before the library is imported, and uses each from the
module.
``python -m tests.hidden each PATH...`` forks a process for each name before the library is imported, hides the
name there, and trains in a way that needs it. Both print the error of each name, as JSON.
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
from torch import Tensor, nn

from .support.forks import Child


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


# -- actions that need a name ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A model of two layers, of which the second may be skipped, with a callback inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.called: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor, *, both: bool = True) -> Tensor:
        self.called()
        hidden: Tensor = self.first(x)
        return self.second(hidden) if both else hidden


def optimizer_of(model: nn.Module, stage: int) -> Any:
    from zero import ZeroOptimizer

    return ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)


def loss_of(model: nn.Module, *, both: bool = True) -> Tensor:
    result: Tensor = model(torch.ones(2, 3), both=both).square().mean()
    return result


def train(stage: int) -> None:
    model = Net()
    optimizer = optimizer_of(model, stage)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def gather_units() -> None:
    """Run a forward on two ranks without common memory."""
    from collectives import Transport, on_threads
    from zero import ZeroOptimizer

    def program(transport: Transport) -> str:
        model = Net()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=3, process_group=transport, lr=0.1)
        error = error_of(lambda: loss_of(model))
        optimizer.close()
        return error

    for error in on_threads(2, program, timeout=20):
        if error:
            raise RuntimeError(error.removeprefix("RuntimeError: "))


def hold_integers() -> None:
    model = Net()
    model.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    optimizer_of(model, 2).describe()


def accumulate() -> None:
    model = Net()
    optimizer = optimizer_of(model, 2)
    with optimizer.no_sync():
        loss_of(model, both=False).backward()
        loss_of(model).backward()
    loss_of(model).backward()
    optimizer.step()


def scale() -> None:
    model = Net()
    optimizer, scaler = optimizer_of(model, 2), torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)


def from_meta() -> None:
    with torch.device("meta"):
        model = Net()
    with torch.device("cpu"):
        optimizer_of(model, 2)


def step_inside_a_forward() -> None:
    model = Net()
    model.called = optimizer_of(model, 3).step
    loss_of(model)


def inside_vmap() -> None:
    model = Net()
    optimizer = optimizer_of(model, 3)
    torch.func.vmap(model)(torch.ones(2, 3))
    optimizer.step()


def read_the_placeholder() -> None:
    model = Net()
    optimizer = optimizer_of(model, 2)
    loss_of(model).backward()
    model.first.weight.grad.untyped_storage()  # type: ignore[union-attr]
    optimizer.step()


def read_a_released_parameter() -> None:
    model = Net()
    optimizer = optimizer_of(model, 3)
    try:
        model.first.weight.sum()
    finally:
        optimizer.close()


def at_stage_2() -> None:
    train(2)


def at_stage_3() -> None:
    train(3)


def count_operations() -> None:
    from zero.planning.models.counting import count

    x = torch.empty(2, device="meta")
    count(lambda: x + x, [x])


NEEDED_BY: dict[str, Callable[[], None]] = {
    "torch:_C._storage_Use_Count": at_stage_2,
    "torch:_C._current_graph_task_id": at_stage_2,
    "torch:_C._current_autograd_node": read_a_released_parameter,
    "torch.autograd:Variable._execution_engine.queue_callback": at_stage_2,
    "torch.autograd.graph:_engine_run_backward": at_stage_2,
    "torch:_C._autograd._top_saved_tensors_default_hooks": gather_units,
    "torch.nn:Module._call_impl": step_inside_a_forward,
    "torch.nn:Module._wrapped_call_impl": step_inside_a_forward,
    "torch:Tensor._make_wrapper_subclass": at_stage_2,
    "torch:Tensor._make_subclass": from_meta,
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass": hold_integers,
    "torch.utils._python_dispatch:TorchDispatchMode": count_operations,
    "torch:_foreach_copy_": accumulate,
    "torch:_foreach_add_": accumulate,
    "torch:_amp_foreach_non_finite_check_and_unscale_": scale,
    "torch:_C._functorch.get_interpreter_stack": at_stage_3,
    "torch:_C._functorch.TransformType": inside_vmap,
    "torch.overrides:_get_current_function_mode_stack": from_meta,
    "torch.utils._device:DeviceContext": from_meta,
    "torch._guards:TracingContext": read_the_placeholder,
    "torch._C._dynamo.eval_frame:set_code_exec_strategy": at_stage_2,
    "torch._C._dynamo.eval_frame:_FrameExecStrategy": at_stage_2,
    "torch._C._dynamo.eval_frame:_FrameAction.SKIP": at_stage_2,
    "torch._C._dynamo.eval_frame:_FrameAction.DEFAULT": at_stage_2,
    "torch._C._dynamo.eval_frame:get_eval_frame_callback": at_stage_3,
}
"""Every name that the library calls, and what calls it."""

COMPARED: dict[str, Callable[[], None]] = {
    "torch:_has_compatible_shallow_copy_type": at_stage_3,
    "torch:ops.aten._foreach_zero_.default": at_stage_2,
    "torch:ops.aten._amp_foreach_non_finite_check_and_unscale_.default": at_stage_2,
}
"""Names with which something is compared: all goes on without them."""


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
    """Hide a name, import the library, restore the name for torch, and return the error of the action that needs it."""
    give_back = hide(path)
    import zero  # noqa: F401

    give_back()
    return error_of({**NEEDED_BY, **COMPARED}[path])


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, *given = sys.argv[1:]
    assert not {"zero", "collectives"} & {name.partition(".")[0] for name in sys.modules}
    if mode == "all":
        print(json.dumps(all_at_once(given)))
    else:
        importlib.import_module("torch._dynamo")  # once, before the forks: the first optimizer of each would import it
        print(json.dumps({path: Child(lambda path=path: one(path)).said() for path in given}))  # type: ignore[misc]
