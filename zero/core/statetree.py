"""Turns nested Python values into JSON and tensors, and back: bit by bit, and without a pickle.

Knows: which values can be written, and how, and which names are reserved. Does not know: files, whose values they are.

JSON's own values stand for themselves. All others are objects with one key, which begins with "$":

    {"$float": "nan"}          a float that is not finite; of a NaN that is not float("nan"), its bits as 16 hex digits
    {"$bytes": "AAE="}         bytes, in base64
    {"$tuple": [...]}          a tuple
    {"$dict": [[key, value]]}  a dict with a key that is no text, or begins with "$"; likewise $OrderedDict, $Counter
    {"$tensor": name}          a tensor, which is returned beside the JSON; on the CPU when it is read
    {"$array": name}           a NumPy array, likewise; {"$scalar": name} a NumPy scalar
    {"$subclass": {...}}       a tensor subclass that wraps others, in states of an optimizer: the name of its class,
                               tensors, shape, strides, and the metadata of ``__tensor_flatten__``, in which there may
                               be {"$dtype": name} and {"$size": [...]}, too; the reader needs the class
    {"$inline": {...}}         a small tensor inside the JSON: its dtype, its shape, and its bytes in base64; it may
                               stand in the place of the name of an array or a scalar
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .parameter_specs import flattened

Rebuild = Callable[[dict[str, Any], Any, torch.Size, tuple[int, ...]], Tensor]  # as a class's ``__tensor_unflatten__``
DTYPES: dict[str, torch.dtype] = {  # by their names in safetensors files
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_Path = tuple[Any, ...]  # the name of the whole, and the keys that lead to a value
_KEYS = (str, int, bool, type(None))
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}
_KINDS = {tag: kind for kind, tag in _DICTS.items()}
_NUMPY = {
    "$array": lambda tensor: tensor.numpy(),
    "$scalar": lambda tensor: tensor.numpy()[()],
}
BLOCKS = "optimizer_blocks"  # a key of a saved param group: its `blocks=`
NO_OPTIONS = ("params", "optimizer_class", "optimizer_module", BLOCKS)  # keys of a saved param group beside its options
N_AVERAGED = "n_averaged"  # the name of a count beside averages
_RESERVED = "__metadata__"  # a safetensors file keeps this name for itself
_SIMPLE = frozenset({int, float, bool, type(None)})
_MOST_BITS = 14_000  # of a whole number: Python reads and writes at most 4,300 digits


class FormatError(ValueError):
    """Bytes or JSON that were saved are not what their format asks for."""


def check_average_name(name: str) -> None:
    """Raise `ValueError` for a name of averages that no folder or file should have."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise ValueError(
            f"bad name of averages {name!r:.200}: use 1 to 100 of A-Z, a-z, 0-9, '_', '-' and '.', and do not begin "
            "with '-' or '.'"
        )


def encode(value: Any, name: str, *, wrappers: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return a value of JSON's types that stands for ``value``, and the tensors that belong to it, by name.

    The tensors may have any strides, and share memory with those in ``value``. ``name``: of the whole, in errors.
    ``wrappers``: also of tensor subclasses. Raises `TypeError` naming the place of a value that cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return _encode(value, (name,), tensors, wrappers), tensors
    except RecursionError as error:
        raise TypeError(f"{name} is nested too deeply to be saved, or contains itself") from error


def encode_inline(value: Any, name: str) -> Any:
    """Return a value of JSON's types that stands for ``value``, its tensors included, which should be small."""
    return inline(*encode(value, name))


def encode_options(options: Mapping[Any, Any], name: str) -> dict[str, Any]:
    """Return the options of a param group as an object of JSON, to which a caller may add keys.

    Raises `TypeError` also for a name of an option that stands for something else in a checkpoint.
    """
    for key in options:
        if type(key) is not str or key.startswith("$") or key in NO_OPTIONS:
            raise TypeError(
                f"{name} has the option {key!r}: a saved option has a text as its name, which does not begin with '$' "
                f"and is none of {', '.join(map(repr, NO_OPTIONS))}"
            )
    found: dict[str, Any] = encode_inline(dict(options), name)
    return found


def encode_states(
    states: Mapping[str, Any], name: str, taken: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON of the states of a parameter that are no tensors, by their names, and the tensors.

    The tensors are the other states, and those within lists and dicts, by names such as "factors.0"; one of at most one
    element is inside the JSON instead. `decode_states` is the inverse. ``name``: of the whole, in errors. ``taken``:
    names of further states. Raises `TypeError` naming a state that cannot be written.
    """
    found = {key: value for key, value in states.items() if isinstance(value, Tensor) and not flattened(value)[0]}
    values, inner = encode({key: value for key, value in states.items() if key not in found}, name, wrappers=True)
    if "$dict" in values:
        raise TypeError(f"{name} has a state whose name is no text, or begins with '$', which cannot be saved")
    small = {key: value for key, value in inner.items() if value.numel() <= 1}
    large = {key: value for key, value in inner.items() if key not in small}
    if twice := {*found, *taken} & large.keys():
        raise TypeError(f"{name} has a state of the name {min(twice)!r}, and a tensor of this name inside another one")
    return inline(values, small), found | large


def decode_states(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], kinds: Mapping[str, Rebuild] | None = None
) -> dict[str, Any]:
    """Return the states that `encode_states` was given. Raises `FormatError` for JSON that it does not make.

    ``kinds``: of `decode`.
    """
    inner = tensor_names(values)
    found: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in inner}
    return found | {name: decode(value, tensors, kinds) for name, value in values.items()}


def tensor_names(value: Any) -> set[str]:
    """Return the names of the tensors that stand beside the JSON of `encode`."""
    if isinstance(value, list):
        return {name for item in value for name in tensor_names(item)}
    if not isinstance(value, Mapping):
        return set()
    beside = {item for key, item in value.items() if key in ("$tensor", *_NUMPY) and isinstance(item, str)}
    return beside | {name for item in value.values() for name in tensor_names(item)}


def inline(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the JSON of `encode` with these ``tensors`` inside it, instead of beside it."""
    if isinstance(value, list):
        return [inline(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return _inlined(tensors[value["$tensor"]]) if value["$tensor"] in tensors else value
    return {
        key: _inlined(tensors[item]) if key in _NUMPY and item in tensors else inline(item, tensors)
        for key, item in value.items()
    }


def _inlined(tensor: Tensor) -> dict[str, Any]:
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    shape = list(tensor.shape)
    return {"$inline": {"dtype": NAMES[tensor.dtype], "shape": shape, "data": base64.b64encode(data).decode()}}


def kinds_in(value: Any) -> dict[str, Rebuild]:
    """Return the classes of the tensor subclasses in a value, by the names under which they are written."""
    if isinstance(value, (list, tuple, dict)):
        inside = value.values() if isinstance(value, dict) else value
        return {name: kind for item in inside for name, kind in kinds_in(item).items()}
    given: Any = value
    names, _ = flattened(given) if isinstance(value, Tensor) else ((), None)
    found = {_class_name(given): type(given).__tensor_unflatten__} if names else {}
    return found | kinds_in([getattr(given, name) for name in names])


def rebuilt(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``change(tensor)``; of a wrapper subclass, the same with ``change`` of each tensor that it wraps."""
    given: Any = tensor
    names, facts = flattened(given)
    if not names:
        return change(tensor)
    parts = {name: rebuilt(getattr(given, name), change) for name in names}
    found: Tensor = type(given).__tensor_unflatten__(parts, facts, given.shape, given.stride())
    return found


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _encode(value: Any, at: _Path, tensors: dict[str, Tensor], wrappers: bool) -> Any:
    def inside(key: Any, item: Any) -> Any:
        return _encode(item, (*at, key), tensors, wrappers)

    if type(value) in _KEYS:
        return _checked(value, at)
    if type(value) is float:
        return _float(value)
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) in (list, tuple):
        items = _numbers(value) or [inside(index, item) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in _DICTS:
        return _encode_dict(value, at, inside)
    if wrappers and isinstance(value, Tensor) and flattened(value)[0]:
        return {"$subclass": _encode_subclass(value, inside)}
    if wrappers and type(value) is torch.Size:
        return {"$size": list(value)}
    if wrappers and isinstance(value, torch.dtype) and value in NAMES:
        return {"$dtype": NAMES[value]}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value.detach(), at, tensors)}
    if type(value) is np.ndarray or isinstance(value, np.generic):
        kind = "$array" if isinstance(value, np.ndarray) else "$scalar"
        try:
            made = torch.from_numpy(np.array(value, order="K"))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{_text(at)} is a NumPy value of {value.dtype!r}, which cannot be saved") from error
        return {kind: _keep(made, at, tensors)}
    kind = f"a {type(value).__name__}"
    if callable(value) and hasattr(value, "__name__"):
        kind = "a class" if isinstance(value, type) else "a function"
    raise TypeError(
        f"{_text(at)} is {kind}: only None, numbers, text, bytes, lists, tuples, dicts, Counters, NumPy values and "
        "tensors can be saved; leave it out, or give it a state_dict() of these"
    )


def _encode_subclass(value: Tensor, inside: Callable[[Any, Any], Any]) -> Any:
    names, facts = flattened(value)
    return {
        "class": _class_name(value),
        "parts": {name: inside(name, getattr(value, name)) for name in names},
        "facts": inside("facts", facts),
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }


def _text(at: _Path) -> str:
    """Return a place as a user would write it."""
    return "".join((at[0], *(f"[{key!r}]" for key in at[1:])))


def _encode_dict(value: dict[Any, Any], at: _Path, inside: Callable[[Any, Any], Any]) -> Any:
    for key in value:
        if type(key) not in _KEYS and not (type(key) is float and math.isfinite(key)):
            raise TypeError(
                f"{_text(at)} has the key {key!r} ({type(key).__name__}): only text and finite numbers are saved"
            )
        _checked(key, at, "a key of ")
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inside(key, item) for key, item in value.items()}
    return {_DICTS[type(value)]: [[key, inside(key, item)] for key, item in value.items()]}


def _numbers(values: list[Any] | tuple[Any, ...]) -> list[Any] | None:
    """Encode a list of nothing but numbers and None, of which there may be many (losses, indices).

    Return None if it has anything else, or a number that JSON cannot hold.
    """
    kinds = {*map(type, values)}
    if not kinds <= _SIMPLE:
        return None
    whole = values if kinds == {int} else [value for value in values if type(value) is int]
    if max(map(int.bit_length, whole), default=0) > _MOST_BITS:
        return None
    return [_float(v) if type(v) is float and not math.isfinite(v) else v for v in values]


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    text, data = repr(value), struct.pack(">d", value)
    return {"$float": text if struct.pack(">d", float(text)) == data else data.hex()}


def _checked(value: Any, at: _Path, of: str = "") -> Any:
    """Return text, or a whole number. Raises `TypeError` if JSON cannot hold it."""
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"{of}{_text(at)} is text that is no Unicode: {value!r:.80}") from error
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise TypeError(f"{of}{_text(at)} is a number of {value.bit_length():,} bits, which cannot be saved")
    return value


def _keep(tensor: Tensor, at: _Path, tensors: dict[str, Tensor]) -> str:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    if not plain or tensor.dtype not in NAMES or tensor.is_meta:
        raise TypeError(
            f"{_text(at)} is a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}, which "
            "cannot be saved"
        )
    name = ""
    for key in at[1:]:
        name = f"{name}.{key}" if name else str(key)
    name = name or "value"
    while name in tensors or name == _RESERVED:
        name += "_"
    resolved = tensor.resolve_conj().resolve_neg()
    tensors[name] = resolved if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)
    return name


def decode(value: Any, tensors: Mapping[str, Tensor], kinds: Mapping[str, Rebuild] | None = None) -> Any:
    """Return what `encode` was given. Raises `FormatError` for JSON that `encode` does not make.

    ``kinds``: of tensor subclasses, as `kinds_in` returns them; a name that is none of these is an error.
    """
    try:
        return _decode(value, tensors, kinds or {})
    except FormatError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise FormatError(f"a saved state cannot be read ({error!r})") from error


def _decode(value: Any, tensors: Mapping[str, Tensor], kinds: Mapping[str, Rebuild]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, kinds) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: _decode(item, tensors, kinds) for key, item in value.items()}
    if len(value) > 1:
        raise FormatError(f"a saved state has {tags[0]!r} and {len(value) - 1} other keys")
    return _decode_tagged(tags[0], value[tags[0]], tensors, kinds)


def _decode_tagged(tag: str, content: Any, tensors: Mapping[str, Tensor], kinds: Mapping[str, Rebuild]) -> Any:
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(content))[0] if len(content) == 16 else float(content)
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag == "$tensor":
        return tensors[content]
    if tag == "$inline":
        return _decode_inline(content)
    if tag == "$subclass":
        return _decode_subclass(content, tensors, kinds)
    if tag == "$size":
        return torch.Size(content)
    if tag == "$dtype":
        return DTYPES[content]
    if tag in _NUMPY:
        return _NUMPY[tag](_decode_inline(content["$inline"]) if isinstance(content, dict) else tensors[content])
    if tag != "$tuple" and tag not in _KINDS:
        raise FormatError(f"a saved state has the unknown tag {tag!r}")
    if not isinstance(content, list):
        raise FormatError(f"a saved state has {tag!r} of what is no list")
    if tag == "$tuple":
        return tuple([_decode(item, tensors, kinds) for item in content])
    return _KINDS[tag]({key: _decode(item, tensors, kinds) for key, item in content})


def _decode_subclass(content: Any, tensors: Mapping[str, Tensor], kinds: Mapping[str, Rebuild]) -> Tensor:
    name = content["class"]
    if name not in kinds:
        raise FormatError(f"a saved state is a {name}, which is rebuilt by an optimizer whose class makes such states")
    parts, facts = _decode(content["parts"], tensors, kinds), _decode(content["facts"], tensors, kinds)
    try:
        return kinds[name](parts, facts, torch.Size(content["shape"]), tuple(content["stride"]))
    except Exception as error:
        raise FormatError(f"a saved state is no {name} ({error!r})") from error


def _decode_inline(content: Any) -> Tensor:
    data = bytearray(base64.b64decode(content["data"], validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(DTYPES[content["dtype"]]).view(content["shape"]).clone()
    if list(tensor.shape) != content["shape"]:
        raise FormatError(f"a saved state has a tensor of the shape {content['shape']}")
    return tensor
