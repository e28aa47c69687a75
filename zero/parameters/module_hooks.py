"""The hooks of one module, kept in order among the user's hooks; and methods that gather as a forward does.

Knows: the order of a module's hooks, compiled calls, how a method is replaced, and what copies of the module get in the
place of hooks. Does not know: what the owner of the hooks does.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.parameter_specs import HELD_ELSEWHERE, is_released, named_parameters, named_parts
from ..core.units import Ignored, UnitModule
from ..runtime.compiled_calls import NotScriptable, inside_compiled_call, interrupting, untraced, wrap_compiled_call

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)  # they hide no tensor
Before = Callable[[nn.Module], None]
After = Callable[[nn.Module, Any, Any], None]  # called with the module, None, and the output (None: it raised)


class ForwardMethod:
    """A replacement, in a module's ``__dict__``, of one of its methods, until `remove`.

    It calls the plain method between ``before`` and ``after``, and has its attributes, as `functools.wraps` gives them.
    It holds the module weakly. Copies of the module, also pickled ones, have the plain method.
    """

    def __init__(self, module: nn.Module, name: str, before: Before, after: After) -> None:
        """Replace the method ``name``. Raises `ValueError` if the module has none of that name."""
        plain = check_method(module, name)
        self._module, self._name, self._before, self._after = weakref.ref(module), name, before, after
        own: Callable[..., Any] | None = module.__dict__.get(name)
        self._own = own  # a method that the user assigned to this instance, not to its class
        self.__module__, self.__doc__ = plain.__module__, plain.__doc__  # the class has these itself
        self.__signature__ = inspect.signature(plain)
        module.__dict__[name] = self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the plain method, such as ``__code__`` or ``__self__``; ``__wrapped__`` is itself."""
        reference = self.__dict__.get("_module")  # without one, this was not initialised
        module = None if reference is None else reference()
        if module is None:
            raise AttributeError(f"{name!r}: the module of this method is gone")
        plain = self._plain(module)
        return plain if name == "__wrapped__" else getattr(plain, name)

    @interrupting
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the module of this method {self._name!r} is gone: hold it, and call module.method()")
        output = None
        try:
            self._before(module)
            output = self._plain(module)(*args, **kwargs)
        finally:
            self._after(module, None, output)
        return output

    @untraced
    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        if self._own is not None:
            return self._own
        found: Callable[..., Any] = inspect.getattr_static(type(module), self._name).__get__(module, type(module))
        return found

    def remove(self) -> None:
        """Restore the plain method, unless the user has replaced this one."""
        module = self._module()
        if module is not None and module.__dict__.get(self._name) is self:
            if self._own is None:
                del module.__dict__[self._name]
            else:
                module.__dict__[self._name] = self._own

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own is not None:
            return (_itself, (self._own,))
        return (getattr, (self._module(), self._name))  # unpickled with the copy's module, which has no such entry yet


def _itself(method: Any) -> Any:
    return method


def check_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of a module. Raises `ValueError` if it has none of that name, `TypeError` for a non-module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_forward_method: a module is needed, not {module!r}")
    found = getattr(module, name, None) if isinstance(name, str) else None
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(f"register_forward_method: {type(module).__name__} has no method {name!r}")
    return found  # type: ignore[no-any-return]


class ModuleListener(Protocol):
    """The receiver of the events of modules. ``hooks``: those of the module."""

    @property
    def needs_gather(self) -> bool:
        """True if some unit must be gathered, so that forwards need saved-tensor hooks."""

    def entered(self, hooks: ModuleHooks) -> None:
        """A forward begins."""

    def left(self, hooks: ModuleHooks, output: Any) -> None:
        """The forward has ended; ``output`` is None if it raised."""

    def push_saver_again(self, hooks: ModuleHooks) -> None:
        """The user's pre-forward hooks have run; they may have pushed saved-tensor hooks of their own."""

    def pop_saver_again(self, hooks: ModuleHooks) -> None:
        """The user's post-forward hooks are about to run."""

    def reached(self, hooks: ModuleHooks) -> None:
        """A backward reaches the output of the forward."""

    def graph_broken(self, hooks: ModuleHooks) -> None:
        """The module's hook broke the graph of a compiled call."""


Action = Callable[..., None]  # called with the owner of the hooks, and the arguments of the hook


class ModuleHooks:
    """The hooks on one module, and on the graphs of its outputs. They hold their owner weakly."""

    def __init__(self, owner: ModuleListener, entry: UnitModule) -> None:
        self.name, self.needs, self.is_root = entry.name, entry.needs, not entry.name
        self._owner, self._module = weakref.ref(owner), weakref.ref(entry.module)
        self._entering, self._leaving = _Hook(self, self._before), _Hook(self, self._after)
        self._first = nn.Module.register_forward_pre_hook(entry.module, self._entering, prepend=True)
        self._last = nn.Module.register_forward_hook(entry.module, self._leaving, always_call=True)
        self._back: Any = None
        self._inner: tuple[Any, Any] | None = None  # the last hook before the forward, and the first one after it
        self._compiled: Any = None  # the module's compiled call
        self._surrounded: Any = None  # its replacement, with the hooks around it
        self._called: Any = None  # what was the compiled call when the last forward began
        self._methods: dict[str, ForwardMethod] = {}
        self.arrange()

    def remove(self) -> None:
        for handle in (self._first, self._last, self._back, *(self._inner or ()), *self._methods.values()):
            if handle is not None:
                handle.remove()
        self._methods = {}
        module = self._module()
        if module is not None and self._surrounded is not None and module._compiled_call_impl is self._surrounded:
            module._compiled_call_impl = self._compiled

    def register(self, module: nn.Module, name: str) -> None:
        """Make a method of the module gather as its forward does."""
        if module.__dict__.get(name) is not self._methods.get(name, self):
            before, after = _Hook(self, self._before), _Hook(self, self._after)
            self._methods[name] = ForwardMethod(module, name, before, after)

    def arrange(self) -> None:
        """Move these hooks to the front before the forward and the backward, and to the end after the forward.

        The user's hooks then run while parameters are installed. Exception: a hook that the user prepended to the
        outermost module since its last forward still runs first.
        """
        module, owner = self._module(), self._owner()
        if module is None or self._first.id not in module._forward_pre_hooks:  # removed by `_enter_compiled`
            return
        if module._compiled_call_impl is not self._surrounded:
            self._surround(module)
        if len(module._forward_hooks) > 1:
            _ordered(module._forward_hooks).move_to_end(self._last.id)
        if len(module._forward_pre_hooks) > 1:
            _ordered(module._forward_pre_hooks).move_to_end(self._first.id, last=False)
            if owner is not None and owner.needs_gather and self._surrounded is None:
                self._arrange_inner(module)
        others = len(module._backward_pre_hooks) - (self._back is not None)
        if others and self._back is None:  # without the user's, ours would add a node to every graph
            reached = _Hook(self, lambda owner, *_: owner.reached(self))
            self._back = nn.Module.register_full_backward_pre_hook(module, reached, prepend=True)
        elif others:
            _ordered(module._backward_pre_hooks).move_to_end(self._back.id, last=False)
        elif self._back is not None:
            self._back.remove()
            self._back = None

    def gathers(self, module: nn.Module) -> bool:
        """Return True if these are the hooks of ``module`` and their optimizer exists."""
        return self._module() is module and self._owner() is not None

    def _arrange_inner(self, module: nn.Module) -> None:
        """Add the innermost hooks: the last before the forward and the first after it.

        The user's pre-forward hooks may push saved-tensor hooks, as torch's composable checkpoint does. Ours must be on
        top of these, so that they pack a parameter first, as they do when the checkpoint calls the module again.
        """
        if self._inner is None:
            push = _Hook(self, lambda owner, *_: owner.push_saver_again(self))
            pop = _Hook(self, lambda owner, *_: owner.pop_saver_again(self))
            before = nn.Module.register_forward_pre_hook(module, push)
            self._inner = before, nn.Module.register_forward_hook(module, pop, always_call=True)
        _ordered(module._forward_pre_hooks).move_to_end(self._inner[0].id)
        _ordered(module._forward_hooks).move_to_end(self._inner[1].id, last=False)

    def _before(self, owner: ModuleListener, *_: Any) -> None:
        module = self._module()
        self._called = None if module is None else module._compiled_call_impl
        self.arrange()
        owner.entered(self)

    def _after(self, owner: ModuleListener, _: Any, output: Any) -> None:
        owner.left(self, output)

    def _surround(self, module: nn.Module) -> None:
        """Put the hooks around the call that `module.compile()` made; inside it they would break its graph."""
        self._compiled, self._surrounded = module._compiled_call_impl, None
        if self._compiled is not None:
            for handle in self._inner or ():
                handle.remove()
            self._inner = None
            self._surrounded = wrap_compiled_call(self._compiled, self._enter_compiled, self._exit_compiled)
            module._compiled_call_impl = self._surrounded

    def _enter_compiled(self) -> bool:
        """Run the pre-forward hook, then remove both hooks for the compiled call. Return True if they were removed."""
        module, owner = self._module(), self._owner()
        if owner is not None:
            self._before(owner)
        if module is None:
            return False
        module._forward_hooks.pop(self._last.id, None)
        return module._forward_pre_hooks.pop(self._first.id, None) is not None

    def _exit_compiled(self, taken_away: bool, output: Any) -> None:
        module, owner = self._module(), self._owner()
        if module is not None and taken_away:
            module._forward_pre_hooks[self._first.id] = self._entering
            module._forward_hooks[self._last.id] = self._leaving
        if owner is not None:
            owner.left(self, output)

    def run(self, interrupted: bool, action: Action, arguments: tuple[Any, ...]) -> None:
        """Run the action of a hook while the owner exists. ``interrupted``: it broke the graph of a compiled call."""
        owner = self._owner()
        if owner is None:
            return
        action(owner, *arguments)
        # a call that was compiled since the module's last forward is not broken: `arrange` has surrounded it
        if interrupted and self._called is self._surrounded:
            owner.graph_broken(self)

    def watch(self, output: Any) -> tuple[bool, bool]:
        """Report to the owner when a backward reaches ``output``. Return whether one can, since a tensor there needs a
        gradient, and whether the output has objects that may hide further tensors."""
        tensors: list[Tensor] = []
        hides = _open(output, tensors)
        # an edit in place of a view gives it another node, and leaves that of its base in the graph
        bases = [tensor._base for tensor in tensors if tensor._base is not None]
        nodes = [tensor.grad_fn for tensor in (*tensors, *bases) if tensor.grad_fn is not None]
        for node in nodes:
            notes: Any = node.metadata
            if self._owner not in notes:  # an output that was passed on belongs to the module that made it
                notes[self._owner] = True
                node.register_prehook(self._reached)
        return bool(nodes), hides

    @untraced
    def _reached(self, *_: Any) -> None:
        owner = self._owner()
        if owner is not None:
            owner.reached(self)


class _Hook(NotScriptable):
    """A hook as it is registered on a module.

    A compiler does not trace it. Copies of the module, also pickled ones, get a hook that does nothing.
    """

    def __init__(self, hooks: ModuleHooks, action: Action) -> None:
        self.hooks, self._action = hooks, action

    @interrupting
    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        _run(self, arguments)

    @untraced
    def act(self, interrupted: bool, arguments: tuple[Any, ...]) -> None:
        self.hooks.run(interrupted, self._action, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Inert, ())

    @property
    def alive(self) -> bool:
        return self.hooks._owner() is not None and bool(self.hooks.needs)


@interrupting
def _run(hook: _Hook, arguments: tuple[Any, ...]) -> None:
    """Run a hook. This is a function of its own, since Dynamo inlines an object's ``__call__``."""
    hook.act(inside_compiled_call(), arguments)


class _Inert(NotScriptable):
    def __call__(self, *_: Any) -> None:
        return None


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make a method of a module gather the same parameters as the module's forward does.

    At stage 3 only a forward gathers automatically. Call this on every rank, after the optimizer is built. If no
    stage-3 optimizer holds the module, it does nothing, so the same line works at every stage. Local.

    With ``mixed_precision``, the method's inputs are not cast, unlike those of the outermost forward.
    `ZeroOptimizer.close` undoes the registration, and a copy of the module has the plain method.

    Args:
        module: a unit, or a module outside all units, for example the model itself.
        name: the method's name, other than ``forward`` (``"generate"``, ``"encode"``, ...).

    Raises:
        ValueError: the module has no such method, or lies inside a unit, which is gathered as a whole.
    """
    check_method(module, name)
    found = _hooks_of(module)
    for hooks in found:
        hooks.register(module, name)
    if not found and not any(_hooks_of(part) for part in module.modules()):
        for own, parameter in named_parameters(module):
            if is_released(parameter):
                raise ValueError(
                    f"register_forward_method: {type(module).__name__}, with the parameter {own!r}, lies inside a "
                    "unit, which is gathered as a whole: register a method of the unit, and call that"
                )


def _hooks_of(module: nn.Module) -> list[ModuleHooks]:
    """Return the hooks, at most one `ModuleHooks`, of an optimizer that gathers around the module's forward."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Hook)]
    return [hook.hooks for hook in hooks if hook.hooks.gathers(module)]


def check_not_in_units(module: nn.Module | None, ignored: Ignored) -> None:
    """Raise `ValueError` if another optimizer gathers a part of the module that is not ``ignored``."""
    for name, part in () if module is None else named_parts(module):
        if not ignored.covers(part) and any(
            isinstance(hook, _Hook) and hook.alive for hook in part._forward_pre_hooks.values()
        ):
            raise ValueError(HELD_ELSEWHERE.format(what=repr(name) if name else "the module"))


def _open(output: Any, tensors: list[Tensor]) -> bool:
    """Append the tensors of a forward's output, also those in sequences, mappings and dataclasses. Return True if it
    has objects that may hide others."""
    if isinstance(output, Tensor):
        tensors.append(output)
        return False
    items: Iterable[Any]
    if isinstance(output, Mapping):
        items = output.values()
    elif isinstance(output, (list, tuple)):
        items = output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, field.name, None) for field in dataclasses.fields(output)]
    else:
        return not (output is None or isinstance(output, _PLAIN))
    hides = False
    for item in items:
        hides |= _open(item, tensors)
    return hides


def _ordered(hooks: Any) -> OrderedDict[int, Any]:
    """Return a module's hooks with their type at run time; torch annotates them as a dict."""
    assert isinstance(hooks, OrderedDict)
    return hooks
