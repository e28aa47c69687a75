"""State dicts whose tensors are read, and computed, when they are asked for.

Knows: names, safetensors files, functions of tensors. Does not know: models, ranks.

    ReadTensors           what can say a tensor's shape without reading it
      TensorFiles         the tensors of safetensors files
      LazyStateDict       another state dict under other names, several tensors as one
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..core.names import Rename, renamed

StateDict = Mapping[str, Tensor] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Shape = tuple[int, ...]
Fuse = Mapping[str, tuple[Sequence[str], Callable[[list[Tensor]], Tensor]]]


class ReadTensors(Mapping[str, Tensor]):
    """Tensors by name; each is read on access."""

    @abstractmethod
    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor; None if only its values tell it, or if there is no such name."""


def tensors_of(state_dict: StateDict) -> Mapping[str, Tensor]:
    """Return a mapping as it is, and files as a mapping.

    Raises `ValueError` if a file cannot be read, and `TypeError` for anything else.
    """
    if isinstance(state_dict, Mapping):
        return state_dict
    one = isinstance(state_dict, (str, os.PathLike))
    given: list[Any] = [state_dict] if one or not isinstance(state_dict, Iterable) else list(state_dict)
    if not all(isinstance(path, (str, os.PathLike)) for path in given):
        raise TypeError(
            "a state dict is a mapping from names to tensors, or the path or paths of safetensors files, not a "
            f"{type(state_dict).__name__}"
        )
    return TensorFiles(given)


def shape_of(values: Mapping[str, Tensor], name: str) -> Shape | None:
    """Return the shape of a value, or None if it is unknown without reading the tensor."""
    if isinstance(values, ReadTensors):
        return values.shape(name)
    return tuple(values[name].shape) if isinstance(values, dict) and name in values else None


class TensorFiles(ReadTensors):
    """The tensors of safetensors files."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        try:
            from safetensors import safe_open  # type: ignore[import-not-found, unused-ignore]
        except ModuleNotFoundError as absent:
            raise ValueError("init_state_dict: to read files, python -m pip install safetensors") from absent
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(os.fspath(path), framework="pt", device="cpu")
            except Exception as error:
                why = "it is a folder: list its files" if os.path.isdir(path) else error
                raise ValueError(f"init_state_dict: {os.fspath(path)!r} cannot be read ({why})") from error
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name in self._files:
                    raise ValueError(f"init_state_dict: {os.fspath(path)} has {name!r}, which another file has, too")
                self._files[name] = file

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> Shape | None:
        return tuple(self._files[name].get_slice(name).get_shape()) if name in self._files else None


class LazyStateDict(ReadTensors):
    """A state dict under other names, with several tensors as one: for ``ZeroOptimizer(init_state_dict=...)``.

    A tensor is read, or computed from those that it needs, when it is asked for. So a rank never holds more of the
    state dict than one tensor and its sources. Nothing is kept. Each rank that builds the optimizer builds its own.

    Args:
        source: a mapping, or the path or paths of safetensors files.
        rename: saved name -> the model's name, or None to leave it out: a mapping, which has only the names that
            change, or a function.
        fuse: the model's name -> saved names, and a function that gets their tensors as a list, in this order, and
            returns one tensor: ``{"qkv.weight": (("q.weight", "k.weight", "v.weight"), torch.cat)}``. These saved names
            are not renamed, and stand for nothing else. Several of the model's names may have one source, to cut it
            into parts.

    Raises:
        ValueError: a file cannot be read, a saved name is missing, ``rename`` raises, or two tensors would get one
            name.
        TypeError: a new name is no text, or an argument is of another kind.
    """

    def __init__(self, source: StateDict, *, rename: Rename | None = None, fuse: Fuse | None = None) -> None:
        self._source = tensors_of(source)
        self._fused = {} if fuse is None else _checked(fuse)
        names, taken = dict.fromkeys(self._source), set[str]()
        for name, (given, _) in self._fused.items():
            for saved in given:
                if saved not in names:
                    raise ValueError(f"fuse: the state dict has no {saved!r}, of which {name!r} is to be made")
            taken.update(given)
        if isinstance(rename, Mapping):
            for saved in rename:
                if saved in taken:
                    raise ValueError(f"rename: {saved!r} of the state dict is in fuse, too: leave it out of rename")
        left = [name for name in names if name not in taken]
        self._plain = {new: saved for saved, new in renamed(rename, left, (), "the state dict").items()}
        for name in self._fused:
            if name in self._plain:
                raise ValueError(f"fuse: {name!r} is to be made, but {self._plain[name]!r} would have that name, too")

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of a name of the model, read or computed now."""
        if name in self._plain:
            return self._source[self._plain[name]]
        given, make = self._fused[name]
        try:
            found = make([self._source[saved] for saved in given])
        except Exception as error:
            raise ValueError(
                f"fuse: {name!r} could not be made of {', '.join(given)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, Tensor):
            raise ValueError(f"fuse: the function of {name!r} must return one tensor, not a {type(found).__name__}")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._plain or name in self._fused  # without reading it

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._fused

    def __len__(self) -> int:
        return len(self._plain) + len(self._fused)

    def shape(self, name: str) -> Shape | None:
        return shape_of(self._source, self._plain[name]) if name in self._plain else None


def _checked(fuse: Fuse) -> dict[str, tuple[tuple[str, ...], Callable[[list[Tensor]], Tensor]]]:
    """Return a copy of ``fuse``. Raises `TypeError` naming an entry of another form."""
    if not isinstance(fuse, Mapping):
        raise TypeError(f"fuse must be a mapping from names of the model, not a {type(fuse).__name__}")
    for name, entry in fuse.items():
        given, make = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else ((), None)
        if not given or isinstance(given, str) or not callable(make):
            raise TypeError(f"fuse: {name!r} needs a pair of a list of saved names and a function, not {entry!r:.200}")
    return {name: (tuple(given), make) for name, (given, make) in fuse.items()}
