"""A method of a module that is called as a forward is: between two hooks.

Knows: how a method is put in the place of another, and what copies of the module get. Does not know: what hooks do.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

Before = Callable[[nn.Module], None]
After = Callable[[nn.Module, Any, Any], None]  # is given the module, None, and the output, or None after an exception


class ForwardMethod:
    """Stands in a module's ``__dict__`` in the place of a method, until `remove`. It holds the module weakly; copies of
    the module, pickled ones too, have the plain method."""

    def __init__(self, module: nn.Module, name: str, before: Before, after: After) -> None:
        """Raises `ValueError` where the module has no such method."""
        plain = check_method(module, name)
        self._module, self._name, self._before, self._after = weakref.ref(module), name, before, after
        own: Callable[..., Any] | None = module.__dict__.get(name)
        self._own = own  # a method that was assigned to this module alone
        self.__name__, self.__doc__ = name, plain.__doc__
        self.__signature__ = inspect.signature(plain)
        module.__dict__[name] = self

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

    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        if self._own is not None:
            return self._own
        found: Callable[..., Any] = inspect.getattr_static(type(module), self._name).__get__(module, type(module))
        return found

    def remove(self) -> None:
        """Put the plain method back, unless the user has replaced this one."""
        module = self._module()
        if module is not None and module.__dict__.get(self._name) is self:
            if self._own is None:
                del module.__dict__[self._name]
            else:
                module.__dict__[self._name] = self._own

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own is not None:
            return (_itself, (self._own,))
        return (getattr, (self._module(), self._name))  # of the copy, which has no such entry yet


def _itself(method: Any) -> Any:
    return method


def check_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """A module's method. Raises `ValueError` where there is none."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_forward_method: a module is needed, not {module!r}")
    found = getattr(module, name, None) if isinstance(name, str) else None
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(f"register_forward_method: {type(module).__name__} has no method {name!r}")
    return found  # type: ignore[no-any-return]
