"""Turns a description of a model into a `Model`: a `config.json`, or a module.

Knows: the keys of configs (`families` has the shapes). Does not know: what a model computes, ranks, hardware. No value
is read, and no tensor has memory.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from ...core.parameter_specs import bindings
from ...core.units import ROOT, find_units
from ..model import Model, ParameterShape, Transformer
from .families import FAMILIES, SIZES, Config, Family
from .parameter_lists import in_units

EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def of_config(path: str | Path) -> Model:
    """Return the model of a Hugging Face `config.json`, given as that file or as its folder.

    Parameters have the names, shapes, ties and order of the class `...ForCausalLM` of transformers, which is not
    imported.

    Raises:
        ValueError: the file cannot be read, its `model_type` is unknown, a size is missing, or it has experts.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as a config.json: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is no config.json: it holds no JSON object")
    return from_config(config, str(config.get("_name_or_path") or file.resolve().parent.name), str(file))


def from_config(config: Mapping[str, Any], name: str, where: str = "the config") -> Model:
    """Return the model of a config's keys. ``where``: what an error calls it. Errors as `of_config`."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        near = difflib.get_close_matches(str(kind), FAMILIES, 1)
        raise ValueError(
            f"{where}: model_type {kind!r} is unknown{f' (did you mean {near[0]!r}?)' if near else ''}; known are "
            f"{', '.join(FAMILIES)}: pass a list of names and shapes with --parameters instead"
        )
    for key in EXPERTS:
        if (config.get(key) or 0) > 1:
            raise ValueError(
                f"{where}: {key} is {config[key]}, and experts are not planned, since each token uses few of them: "
                "pass a list of names and shapes with --parameters instead"
            )
    family = FAMILIES[kind]
    config = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    numbers = _numbers(config, family, where)
    model = in_units(name, family.parameters(numbers, config))
    return replace(model, hidden=numbers.hidden, vocabulary=numbers.vocabulary, transformer=numbers)


def model_of(module: nn.Module, name: str) -> Model:
    """Return the description of a module, which may be on the meta device, with the units of `zero.ZeroOptimizer`."""
    found = find_units(module, None)
    numbers = found.numbers()
    names: dict[int, list[str]] = {}
    for binding in bindings(module):
        names.setdefault(id(binding.parameter), []).append(binding.name)
    parameters = tuple(
        ParameterShape(
            tuple(names[id(parameter)]),
            tuple(parameter.shape),
            numbers.get(id(parameter), ROOT),
            parameter.requires_grad,
        )
        for parameter in module.parameters()
    )
    return Model(name, parameters, found.names)


def _numbers(config: Config, family: Family, where: str) -> Transformer:
    """Return the plain numbers of a config."""
    sizes: dict[str, Any] = {"ffn": 0}
    for size, keys in SIZES.items():
        given = [(key, config[key]) for key in keys if config.get(key)]
        if given:
            key, sizes[size] = given[0]
            if not isinstance(sizes[size], int) or sizes[size] < 1:
                raise ValueError(f"{where}: {key} is {sizes[size]!r}, and must be a positive integer")
        elif size in ("hidden", "layers", "heads", "vocabulary"):
            raise ValueError(f"{where} has none of the keys {', '.join(keys)}: add the one that its model has")
    sizes["ffn"] = sizes["ffn"] or config.get("expansion_ratio", 4) * sizes["hidden"]
    traits = {key: value(config) if callable(value) else value for key, value in family.traits.items()}
    if not traits.pop("learned", False):
        sizes.pop("positions", None)
    try:
        return Transformer(**{**sizes, **traits}, tied=bool(config["tie_word_embeddings"]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
