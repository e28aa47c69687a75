"""The parameters and modules of a model that an optimizer leaves to others: it neither shards nor synchronises them.

Knows: modules and tensors. Does not know: who trains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

Given = nn.Module | Tensor | Iterable[nn.Module | Tensor]


class Ignored:
    """A set of parameters and buffers, by identity. An ignored module has all of its own in it."""

    def __init__(self, given: Given | None = None, module: nn.Module | None = None) -> None:
        """``given``: parameters and modules, or one; ``module``: the model that they are parts of.

        Raises:
            TypeError: an entry is neither a parameter nor a module.
            ValueError: there is no module, or a parameter is no part of it.
        """
        self._tensors: dict[int, Tensor] = {}  # the tensors themselves, so that no other one gets the id
        self._modules: dict[int, nn.Module] = {}
        entries: Sequence[Any] = [given] if isinstance(given, (nn.Module, Tensor)) else list(given or ())
        if entries and module is None:
            raise ValueError("ignored= has parts of the module: pass the module itself, or parameters and module=model")
        known = set() if module is None else {id(each) for each in (*module.parameters(), *module.buffers())}
        for number, entry in enumerate(entries):
            if isinstance(entry, nn.Module):
                self._modules |= {id(part): part for part in entry.modules()}
            elif not isinstance(entry, Tensor):
                raise TypeError(f"ignored[{number}] is a {type(entry).__name__}, neither a parameter nor a module")
            for tensor in (*entry.parameters(), *entry.buffers()) if isinstance(entry, nn.Module) else (entry,):
                if id(tensor) not in known:
                    raise ValueError(f"ignored[{number}] is no part of the optimizer's module: leave it out")
                self._tensors[id(tensor)] = tensor

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._tensors

    def has_module(self, part: nn.Module) -> bool:
        """Return whether a module is ignored by itself, or as a part of such a module."""
        return id(part) in self._modules

    def covers(self, part: nn.Module) -> bool:
        """Return whether a module is ignored: by itself, or because it has parameters and all of them are."""
        if not self._tensors:
            return False
        parameters = list(part.parameters())
        return self.has_module(part) or (bool(parameters) and all(each in self for each in parameters))
