"""Turns a description of a model into a `Model`: a `config.json`, a list of parameters, or a module.

Knows: the keys of configs (`families` has the shapes), headers of safetensors files, lists of names and shapes.
Does not know: what a model computes, ranks, hardware. No value is read, and no tensor has memory.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from ...core.parameter_specs import bindings
from ...core.units import ROOT, Predicate, find_units
from ..model import Model, ParameterShape, Transformer
from .families import FAMILIES, SIZES, Config, Family
from .meta_results import on_meta
from .reference import ReferenceModel

EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ROOT_NAME: Final = "the root's rest"
_BLOCK: Final = "*"

_Line = tuple[list[str], str, bool]  # words, the parameter that it may be another name of, and whether it always is


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
    sizes = _sizes(config, family, where)
    transformer = _transformer(config, family, sizes)
    parameters, units = _expand(family.parameters, config, sizes)
    return Model(name, parameters, units, transformer.hidden, transformer.vocabulary, transformer)


def from_numbers(numbers: Transformer, name: str) -> Model:
    """Return the model of a transformer's numbers, with the parameters of `reference.ReferenceModel`."""
    with on_meta():
        one = model_of(ReferenceModel(replace(numbers, layers=1, decoder_layers=min(1, numbers.decoder_layers))), name)
    counts = {"blocks.0": numbers.decoder_layers or numbers.layers, "encoder.0": numbers.layers}
    parameters: list[ParameterShape] = []
    units = [ROOT_NAME]
    for number, members in itertools.groupby(one.parameters, key=lambda parameter: parameter.unit):
        if number == ROOT:
            parameters += members
            continue
        block, unit = list(members), one.units[number]
        for index in range(counts[unit]):
            name_of = unit.removesuffix("0") + str(index)
            for parameter in block:
                own = tuple(key.replace(unit, name_of, 1) for key in parameter.names)
                parameters.append(replace(parameter, names=own, unit=len(units)))
            units.append(name_of)
    return Model(name, tuple(parameters), tuple(units), numbers.hidden, numbers.vocabulary, numbers)


def model_of(module: nn.Module, name: str, units: Predicate | None = None) -> Model:
    """Return the description of a module, which may be on the meta device.

    Args:
        module: what `zero.ZeroOptimizer` would be built over.
        name: what the plan calls it.
        units: which modules are units, as for `zero.ZeroOptimizer`; None for its default.
    """
    found = find_units(module, units)
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


def _sizes(config: Config, family: Family, where: str) -> dict[str, Any]:
    """Return every size and condition of a config by its name in `families`."""
    sizes: dict[str, Any] = {}
    for size, keys in SIZES.items():
        given = [config[key] for key in keys if config.get(key)]
        if given:
            sizes[size] = given[0]
        elif size in ("hidden", "layers", "heads", "vocabulary"):
            raise ValueError(f"{where} has none of the keys {', '.join(keys)}: add the one that its model has")
    for size, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: {' or '.join(SIZES[size])} is {value!r}, and must be a positive integer")
    hidden, heads = sizes["hidden"], sizes["heads"]
    if "head_dim" not in sizes and hidden % heads:
        raise ValueError(f"{where}: {heads} heads do not divide {hidden} features, and there is no head_dim: add one")
    sizes.setdefault("head_dim", hidden // heads)
    sizes.setdefault("kv_heads", heads)
    sizes.setdefault("ffn", config.get("expansion_ratio", 4) * hidden)
    sizes.setdefault("positions", 0)
    sizes.update({key: derive(config) for key, derive in family.derived.items()})
    sizes["q"], sizes["kv"] = heads * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    return sizes


def _transformer(config: Config, family: Family, sizes: Mapping[str, Any]) -> Transformer:
    """Return the plain numbers of a config."""
    traits = {key: value(config) if callable(value) else value for key, value in family.traits.items()}
    learned = traits.pop("learned", False)
    known = {each.name for each in fields(Transformer)}
    given = {key: value for key, value in sizes.items() if key in known}
    return Transformer(
        **{**given, **traits, "positions": sizes["positions"] if learned else 0},
        tied=bool(config["tie_word_embeddings"]),
    )


def _expand(lines: str, config: Config, sizes: Mapping[str, Any]) -> tuple[tuple[ParameterShape, ...], tuple[str, ...]]:
    """Return the parameters and units that the lines of a family describe."""
    parameters: list[ParameterShape] = []
    units = [ROOT_NAME]
    place: dict[str, int] = {}
    for prefix, group in _groups(lines.splitlines()):
        blocks: Iterable[int] = (0,)
        if prefix:
            blocks = range(sizes["decoder_layers" if prefix.startswith("decoder.") else "layers"])
        for block in blocks:
            if prefix:
                units.append(f"{prefix.rstrip('.')}.{block}")
            for words, target, always in group:
                if not _holds(words, config, sizes, block):
                    continue
                name = words[0].replace(_BLOCK, str(block), 1)
                if target and (always or config["tie_word_embeddings"]):
                    first = parameters[place[target]]
                    parameters[place[target]] = replace(first, names=(*first.names, name))
                    continue
                shape = tuple(_size(word, sizes) for word in words[1:] if not word.startswith("?"))
                place[name] = len(parameters)
                parameters.append(ParameterShape((name,), shape, len(units) - 1 if prefix else ROOT))
    return tuple(parameters), tuple(units)


def _groups(lines: Iterable[str]) -> Iterator[tuple[str, list[_Line]]]:
    """Yield consecutive lines of one list of blocks together, with its prefix; lines outside blocks one by one."""
    prefix, group = "", list[_Line]()
    for line in filter(None, lines):
        described, sign, target = re.split(r" (==?) ", line) if " = " in line or " == " in line else (line, "", "")
        words = described.split()
        own = words[0].partition(_BLOCK)[0] if _BLOCK in words[0] else ""
        if group and (own != prefix or not own):
            yield prefix, group
            group = []
        prefix = own
        group.append((words, target, sign == "=="))
    yield prefix, group


def _holds(words: list[str], config: Config, sizes: Mapping[str, Any], block: int) -> bool:
    """Return whether the conditions of a line hold."""
    for word in words:
        if word == "?first":
            if block:
                return False
        elif word.startswith("?"):
            key = word.lstrip("?!")
            if bool(sizes[key] if key in sizes else config.get(key)) == word.startswith("?!"):
                return False
    return True


def _size(text: str, sizes: Mapping[str, Any]) -> int:
    """Return the value of a sum of products of sizes and integers, such as ``q+2*kv``."""
    total = 0
    for term in text.split("+"):
        product = 1
        for factor in term.split("*"):
            value: int = int(factor) if factor.isdigit() else sizes[factor]
            product *= value
        total += product
    return total
