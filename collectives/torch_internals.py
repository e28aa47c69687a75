"""Every private name of torch that `collectives` and `zero` use, and where a public one would not do.

Knows: where torch keeps each name, and what it is needed for. Does not know: what is done with it.

Each name is torch's own object, resolved when this module is imported: to call it costs what it costs in torch. Where
the installed torch does not have it, the import works all the same, and the first use raises a `RuntimeError` that says
which name is missing.

Attributes of objects cannot be resolved ahead. They are read where they are used:

    attribute                       of
    _cdata                          UntypedStorage
    _get_backend                    ProcessGroup (without it: the default time limit)
    _timeout                        its options (as above)
    _root_mesh                      DeviceMesh (without it: no larger mesh)
    _version                        Tensor
    _base                           Tensor
    _backward_hooks                 Tensor
    _post_accumulate_grad_hooks     Tensor
    _parameters                     Module
    _buffers                        Module
    _non_persistent_buffers_set     Module
    _forward_pre_hooks              Module
    _forward_pre_hooks_with_kwargs  Module
    _forward_hooks                  Module
    _backward_pre_hooks             Module
    _compiled_call_impl             Module
    _forward_unimplemented          Module (the name of a forward that was never written)
    _optimizer_...                  Optimizer (keys that begin so are hooks, which are not copied)
    hooked, __wrapped__             Optimizer.step
    _found_inf_per_device           GradScaler
    _torchdynamo_disable            a function (Dynamo reads it)
    _is_profiler_enabled            its profiler (without it: as if a profiler ran)

The library also relies on what torch does under public names: autograd adds to ``p.grad`` by ``add_`` or ``add``
(`zero.gradients.grad_publisher`), it calls hooks in the order of these dictionaries (`zero.parameters.module_hooks`),
and a checkpoint computes a forward anew inside a function called `unpack_hook` (`zero.parameters.unit_manager`), and
`GradScaler.step(optimizer)` reads ``optimizer._step_supports_amp_scaling`` first (`zero.gradients.reducer`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

TESTED_VERSION = "2.13"


class _Missing:
    """Stands for a name that the installed torch does not have: it raises whenever it is used."""

    def __init__(self, path: str, purpose: str) -> None:
        self.__path, self.__purpose = path, purpose

    def __raise(self) -> NoReturn:
        raise RuntimeError(
            f"torch {torch.__version__} has no {self.__path}, which {self.__purpose}: use torch {TESTED_VERSION}, with "
            "which this library is tested"
        )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self.__raise()

    def __getattr__(self, name: str) -> NoReturn:
        self.__raise()

    def __instancecheck__(self, instance: object) -> NoReturn:
        self.__raise()


def _find(path: str, purpose: str) -> Any:
    """Return what ``path`` names, as ``"module:attribute.attribute"``, or what raises when it is used.

    ``purpose``: what the library needs it for; it completes a sentence that begins with "which".
    """
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        return _Missing(path.replace(":", "."), purpose)


def missing(*names: object) -> Any:
    """Return the first of ``names`` that the installed torch does not have, or None. What is returned raises when it is
    used: a decorator that needs the names returns it, so that the import of a module does not raise."""
    return next((name for name in names if isinstance(name, _Missing)), None)


# -- memory ------------------------------------------------------------------------------------------------------------

storage_use_count: Callable[[int], int] = _find(
    "torch:_C._storage_Use_Count", "tells whether a block of scratch memory is still in use"
)
set_version_counters: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = _find(
    "torch:_C._autograd._unsafe_set_version_counter", "tells which tensors share a version counter"
)

# -- streams -----------------------------------------------------------------------------------------------------------

# None in builds of torch without CUDA. The public `torch.cuda.current_stream` makes an object, at ten times the cost.
current_raw_stream: Callable[[int], int] | None = getattr(sys.modules["torch._C"], "_cuda_getCurrentRawStream", None)

# -- the autograd engine -----------------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = _find("torch:_C._current_graph_task_id", "tells one backward from another")
current_autograd_node: Callable[[], Any] = _find(
    "torch:_C._current_autograd_node", "returns the node of a graph whose backward runs"
)
queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd:Variable._execution_engine.queue_callback", "tells when a backward is over"
)
# The frames of `torch.autograd.backward` and `grad` would not do: where an argument has a `__torch_function__`, as a
# released parameter has, there are two of them in one backward.
engine_run_backward: FunctionType = _find(
    "torch.autograd.graph:_engine_run_backward", "tells which threads are inside a backward"
)
# `saved_tensors_hooks` pushes and pops; nothing public returns the hooks that are there.
top_saved_tensors_hooks: Callable[[bool], Any] = _find(
    "torch:_C._autograd._top_saved_tensors_default_hooks", "returns the hooks through which tensors are being saved"
)

# -- modules -----------------------------------------------------------------------------------------------------------

call_impl: FunctionType = _find("torch.nn:Module._call_impl", "tells which threads are inside a forward")
# `Module.__call__` is the same function, until a tracer such as that of `torch.fx` puts another in its place.
wrapped_call_impl: FunctionType = _find(
    "torch.nn:Module._wrapped_call_impl", "tells which threads are inside a forward"
)

# Modules that wrap another one: the name of the attribute that holds it, and the class. Where the module of the class
# was not imported, there is no such wrapper. It is not imported here, because that takes long.
WRAPPERS = {
    "_orig_mod": ("torch._dynamo.eval_frame", "OptimizedModule"),
    "_checkpoint_wrapped_module": ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
}


def wrapped_key(module: torch.nn.Module) -> str | None:
    """Return the name of the attribute that holds the module which ``module`` wraps; None if it is no wrapper."""
    for key, (place, name) in WRAPPERS.items():
        found = getattr(sys.modules.get(place), name, None)
        if found is not None and isinstance(module, found):
            return key
    return None


# -- tensors -----------------------------------------------------------------------------------------------------------

make_wrapper_subclass: Callable[..., Any] = _find(
    "torch:Tensor._make_wrapper_subclass", "makes the placeholder of a gradient that this rank does not hold"
)
make_subclass: Callable[[type, Tensor, bool], Any] = _find(
    "torch:Tensor._make_subclass", "makes a parameter of another one's class"
)
is_traceable_wrapper_subclass: Callable[[object], bool] = _find(
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass", "tells whether a tensor wraps others"
)
# `torch.utils.flop_counter` is the public one built on it, and counts nothing but the operations of matrix products.
TorchDispatchMode: type = _find(
    "torch.utils._python_dispatch:TorchDispatchMode", "counts the operations and the memory of a model"
)
# Only compared with what `nn.Module.to` calls; a torch without it never does.
has_compatible_shallow_copy_type: object = _find(
    "torch:_has_compatible_shallow_copy_type", "compares the types of a tensor before and after a conversion"
)

# -- operators ---------------------------------------------------------------------------------------------------------

foreach_copy_: Callable[[list[Tensor], list[Tensor]], None] = _find(
    "torch:_foreach_copy_", "copies gradients into a bucket, and master weights to parameters"
)
foreach_add_: Callable[[list[Tensor], list[Tensor]], None] = _find("torch:_foreach_add_", "adds gradients to a bucket")
foreach_mul_: Callable[[list[Tensor], float], None] = _find("torch:_foreach_mul_", "scales all gradients")
foreach_div_: Callable[[list[Tensor], float], None] = _find("torch:_foreach_div_", "divides the sums of all buckets")
amp_unscale_: Callable[[list[Tensor], Tensor, Tensor], None] = _find(
    "torch:_amp_foreach_non_finite_check_and_unscale_", "unscales gradients with the bits of `GradScaler`"
)
# Only compared with what a placeholder is asked for; a torch without them never asks.
aten_foreach_zero_: object = _find("torch:ops.aten._foreach_zero_.default", "zeroes gradients")
aten_amp_unscale_: Any = _find(
    "torch:ops.aten._amp_foreach_non_finite_check_and_unscale_.default", "unscales gradients"
)

# -- what is under way -------------------------------------------------------------------------------------------------

get_interpreter_stack: Callable[[], Any] = _find(
    "torch:_C._functorch.get_interpreter_stack", "tells which transforms of torch.func are under way"
)
TransformType: Any = _find("torch:_C._functorch.TransformType", "tells which transforms of torch.func differentiate")
# `torch.get_default_device()` returns the CPU both where it was set and where nothing was.
get_function_modes: Callable[[], list[Any]] = _find(
    "torch.overrides:_get_current_function_mode_stack", "tells whether a default device was set"
)
DeviceContext: type = _find("torch.utils._device:DeviceContext", "tells whether a default device was set")

# -- Dynamo ------------------------------------------------------------------------------------------------------------

# `torch.compiler.is_compiling()` is also True in the user's own code while that is traced.
TracingContext: Any = _find("torch._guards:TracingContext", "tells whether a compiler looks at a gradient")
# `torch.compiler.disable` would import Dynamo with this library, and wrap every call.
set_code_exec_strategy: Callable[..., None] = _find(
    "torch._C._dynamo.eval_frame:set_code_exec_strategy", "keeps calls and hooks of this library out of compiled graphs"
)
FrameExecStrategy: Callable[[Any, Any], Any] = _find(
    "torch._C._dynamo.eval_frame:_FrameExecStrategy", "keeps calls and hooks of this library out of compiled graphs"
)
SKIP_FRAME: Any = _find(
    "torch._C._dynamo.eval_frame:_FrameAction.SKIP", "keeps calls and hooks of this library out of compiled graphs"
)
DEFAULT_FRAME: Any = _find(
    "torch._C._dynamo.eval_frame:_FrameAction.DEFAULT", "keeps calls and hooks of this library out of compiled graphs"
)
get_eval_frame_callback: Callable[[], Any] = _find(
    "torch._C._dynamo.eval_frame:get_eval_frame_callback", "tells whether a hook has broken a compiled graph"
)
