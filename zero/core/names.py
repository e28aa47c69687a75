"""Names of the parts and tensors of a module, as the module has them without `torch.compile` and `checkpoint_wrapper`.

Knows: the wrappers that torch puts around a module, and into the names of what is inside. Does not know: optimizers,
files.

    torch.compile(model)                          "_orig_mod.blocks.0.weight"                   -> "blocks.0.weight"
    model.blocks[0] = torch.compile(block)        "blocks.0._orig_mod.weight"                   -> "blocks.0.weight"
    model.blocks[0] = checkpoint_wrapper(block)   "blocks.0._checkpoint_wrapped_module.weight"  -> "blocks.0.weight"

In a module a wrapper is known by its class, so that another module may have a child of such a name. In a name from
elsewhere (a file, a state dict) it is known by its name, and only if the name is not one of the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from collectives.torch_internals import WRAPPERS, wrapped_key

MASTERS = "masters"  # a key of state dicts, and a folder of checkpoints: the master weights
_Value = TypeVar("_Value")
_DDP = "module."
Rename = Mapping[str, str | None] | Callable[[str], str | None]
"""Old names -> new ones, None for what is left out."""


def named_parts(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module, as ``module.named_modules`` does. What a wrapper wraps has the wrapper's own name."""
    found: dict[str, tuple[str, nn.Module]] = {}  # by torch's name: that without wrappers, and the module
    for name, part in module.named_modules(remove_duplicate=remove_duplicate):
        above, _, key = name.rpartition(".")
        plain = ""
        if name:
            prefix, holder = found.get(above, (above, None))  # None: a key with a dot, or names of the class's own
            plain = prefix if holder is not None and key == wrapped_key(holder) else child_name(prefix, key)
        found[name] = plain, part
        yield plain, part


def named_children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of ``module``, whose own name is ``prefix``, as ``module.named_children`` does."""
    inside = wrapped_key(module)
    for key, child in module.named_children():
        yield prefix if key == inside else child_name(prefix, key), child


def named_parameters(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter, as ``module.named_parameters`` does."""
    return _members(module, "_parameters", remove_duplicate)


def own_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters that ``module.named_parameters`` yields, which a class may choose, with their names."""
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    return [(names.get(id(parameter), name), parameter) for name, parameter in module.named_parameters()]


def named_buffers(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield each buffer, as ``module.named_buffers`` does."""
    return _members(module, "_buffers", remove_duplicate)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, once for each of their names."""
    yield from named_parameters(module, remove_duplicate=False)
    yield from named_buffers(module, remove_duplicate=False)


def _members(module: nn.Module, registry: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for prefix, part in named_parts(module, remove_duplicate=remove_duplicate):
        for key, tensor in getattr(part, registry).items():
            if tensor is not None and id(tensor) not in seen:
                if remove_duplicate:
                    seen.add(id(tensor))
                yield child_name(prefix, key), tensor


def child_name(prefix: str, key: str) -> str:
    """Return the name of what a module called ``prefix`` has under ``key``."""
    return f"{prefix}.{key}" if prefix else key


# -- names from elsewhere ----------------------------------------------------------------------------------------------


def without_wrappers(name: str) -> str:
    """Return a name without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def all_without_wrappers(names: Iterable[str]) -> list[str]:
    """Return names that a user gives, without what wrappers have put into them; as they are if two would be equal."""
    given = list(names)
    plain = [without_wrappers(name) for name in given]
    return plain if len(set(plain)) == len(set(given)) else given


def known_as(name: str, known: Container[str]) -> str:
    """Return the name under which a model knows a tensor that is called ``name`` elsewhere; ``name`` if it does not.

    ``known``: the names of the model.
    """
    plain = without_wrappers(name)
    return plain if name not in known and plain in known else name


def by_known_name(values: Mapping[str, _Value], known: Container[str]) -> dict[str, _Value]:
    """Return ``values`` by the names of the model: see `known_as`. A value whose name is taken keeps its own."""
    found = {name: known_as(name, known) for name in values}
    return {name if plain in values else plain: values[name] for name, plain in found.items()}


def remark_on_prefix(names: Iterable[str], known: Container[str]) -> str:
    """Return what an error adds if all names would be names of the model without the prefix of DistributedDataParallel;
    else an empty text."""
    plain = [without_wrappers(name) for name in names]
    if not plain or not all(name.startswith(_DDP) and name.removeprefix(_DDP) in known for name in plain):
        return ""
    return (
        f". Its names begin with {_DDP!r}, which DistributedDataParallel puts before those of the model: take that away"
    )


def renamed(
    rename: Rename | None, saved: Iterable[str], known: Container[str], where: str, also: Container[str] = ()
) -> dict[str, str]:
    """Return saved name -> new name, without what is left out.

    Args:
        rename: saved name -> new name, or None to leave it out; a mapping has only the names that change.
        saved: all saved names.
        known: the names of the model, as far as they are known.
        where: what has the saved names, for errors: "the checkpoint".
        also: further names that a mapping may have.

    Raises:
        ValueError: a mapping has a name that was not saved, two saved names become one, or ``rename`` raises.
        TypeError: a new name is no text, or ``rename`` is neither a mapping nor a function.
    """
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(f"rename must be a mapping from saved names to new ones, or a function, not {rename!r}")
    there = dict.fromkeys(saved)
    if isinstance(rename, Mapping):
        for name in rename:
            if name not in there and name not in also:
                raise ValueError(f"rename: {where} has no {name!r}")
    found: dict[str, str] = {}
    before: dict[str, str] = {}  # the other way round
    for name in there:
        new = new_name(rename, name)
        if new is None:
            continue
        plain = known_as(new, known)
        new = new if plain in there and plain != name else plain  # a name that is taken keeps its own
        if new in before:
            raise ValueError(f"rename: {before[new]!r} and {name!r} of {where} would both become {new!r}")
        found[name], before[new] = new, name
    return found


def new_name(rename: Rename | None, name: str) -> str | None:
    """Return the new name of one saved name; None if it is left out. Raises like `renamed`."""
    if isinstance(rename, Mapping):
        new = rename.get(name, name)
    elif rename is None:
        return name
    else:
        try:
            new = rename(name)
        except Exception as error:
            raise ValueError(f"rename: the function failed for {name!r} ({type(error).__name__}: {error})") from error
    if new is not None and not isinstance(new, str):
        raise TypeError(f"rename: the new name of {name!r} is {new!r}, neither a text nor None")
    return new
