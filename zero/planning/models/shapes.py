"""Turns a description of a model into a `Model`: a `config.json`, or a module.

The shapes of known language models: for each `model_type` of a Hugging Face `config.json` its parameters.

Sources: the classes `...ForCausalLM` (T5: `T5ForConditionalGeneration`) of transformers 5.24, and their configs.

Reads lists of parameters: headers of safetensors files and their index, or lines of text.

Knows: the keys of configs, the shapes of known models, headers of safetensors files. Does not know: what a model
computes, ranks, hardware. No value is read, and no tensor has memory.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from ...core.parameter_specs import bindings
from ...core.units import ROOT, find_units
from ..model import ROOT_NAME, Model, ParameterShape, Transformer

Config = Mapping[str, Any]
Shapes = list[tuple[str, tuple[int, ...] | str]]
"""Parameters by name: the shape, or the name of the parameter of which this is another name."""

SIZES: Final[dict[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
"""The keys under which configs keep each size. The first four must be there; the others have defaults."""


@dataclass(frozen=True)
class Family:
    """What models of one `model_type` have in common.

    Attributes:
        parameters: returns them for the numbers and the config of a model.
        defaults: keys that a config may leave out.
        traits: fields of `Transformer` that are the same for all, or computed from the config with its defaults, and
            "learned": whether positions are.
    """

    parameters: Callable[[Transformer, Config], Shapes]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)


def _layer(name: str, *shape: int, bias: bool = False) -> Shapes:
    """Return the parameters of a linear layer, of an embedding or of a norm."""
    return [(f"{name}.weight", shape), *([(f"{name}.bias", shape[:1])] if bias else [])]


def _conv(name: str, out: int, features: int) -> Shapes:
    """Return the parameters of GPT-2's Conv1D, which keeps (in, out)."""
    return [(f"{name}.weight", (features, out)), (f"{name}.bias", (out,))]


def _decoder(numbers: Transformer, root: Shapes, blocks: str, block: Shapes, last: Shapes) -> Shapes:
    """Return the parameters of the root (its embedding first), of each block, of the last norm, and of the head."""
    embedding, shape = root[0]
    repeated: Shapes = [(f"{blocks}.{number}.{name}", of) for number in range(numbers.layers) for name, of in block]
    return [*root, *repeated, *last, ("lm_head.weight", embedding if numbers.tied else shape)]


def _widths(numbers: Transformer) -> tuple[int, int, int, int]:
    """Return the features of a token, of the feed-forward network, of queries, and of keys."""
    head = numbers.head_dim
    return numbers.hidden, numbers.ffn, numbers.heads * head, numbers.kv_heads * head


def _llama(numbers: Transformer, _: Config) -> Shapes:
    hidden, ffn, queries, keys = _widths(numbers)
    qkv, mlp, has_norms = numbers.qkv_bias, numbers.mlp_bias, numbers.norm != "plain"
    block = [
        *_layer("self_attn.q_proj", queries, hidden, bias=qkv),
        *_layer("self_attn.k_proj", keys, hidden, bias=qkv),
        *_layer("self_attn.v_proj", keys, hidden, bias=qkv),
        *_layer("self_attn.o_proj", hidden, queries, bias=numbers.out_bias),
    ]
    if numbers.head_norms:
        block += _layer("self_attn.q_norm", numbers.head_dim) + _layer("self_attn.k_norm", numbers.head_dim)
    block += _layer("mlp.gate_proj", ffn, hidden, bias=mlp) + _layer("mlp.up_proj", ffn, hidden, bias=mlp)
    block += _layer("mlp.down_proj", hidden, ffn, bias=mlp)
    if has_norms:
        block += _layer("input_layernorm", hidden) + _layer("post_attention_layernorm", hidden)
    root, last = _layer("model.embed_tokens", numbers.vocabulary, hidden), _layer("model.norm", hidden)
    return _decoder(numbers, root, "model.layers", block, last if has_norms else [])


def _phi3(numbers: Transformer, _: Config) -> Shapes:
    hidden, ffn, queries, keys = _widths(numbers)
    block = [
        *_layer("self_attn.o_proj", hidden, queries),
        *_layer("self_attn.qkv_proj", queries + 2 * keys, hidden),
        *_layer("mlp.gate_up_proj", 2 * ffn, hidden),
        *_layer("mlp.down_proj", hidden, ffn),
        *_layer("input_layernorm", hidden),
        *_layer("post_attention_layernorm", hidden),
    ]
    root = _layer("model.embed_tokens", numbers.vocabulary, hidden)
    return _decoder(numbers, root, "model.layers", block, _layer("model.norm", hidden))


def _gpt2(numbers: Transformer, _: Config) -> Shapes:
    hidden, ffn = numbers.hidden, numbers.ffn
    block = [
        *_layer("ln_1", hidden, bias=True),
        *_conv("attn.c_attn", 3 * hidden, hidden),
        *_conv("attn.c_proj", hidden, hidden),
        *_layer("ln_2", hidden, bias=True),
        *_conv("mlp.c_fc", ffn, hidden),
        *_conv("mlp.c_proj", hidden, ffn),
    ]
    root = _layer("transformer.wte", numbers.vocabulary, hidden)
    root += _layer("transformer.wpe", numbers.positions, hidden)
    return _decoder(numbers, root, "transformer.h", block, _layer("transformer.ln_f", hidden, bias=True))


def _gpt_neox(numbers: Transformer, _: Config) -> Shapes:
    hidden, ffn = numbers.hidden, numbers.ffn
    block = [
        *_layer("input_layernorm", hidden, bias=True),
        *_layer("post_attention_layernorm", hidden, bias=True),
        *_layer("attention.query_key_value", 3 * hidden, hidden, bias=numbers.qkv_bias),
        *_layer("attention.dense", hidden, hidden, bias=numbers.out_bias),
        *_layer("mlp.dense_h_to_4h", ffn, hidden, bias=True),
        *_layer("mlp.dense_4h_to_h", hidden, ffn, bias=True),
    ]
    root, last = _layer("gpt_neox.embed_in", numbers.vocabulary, hidden), "gpt_neox.final_layer_norm"
    return _decoder(numbers, root, "gpt_neox.layers", block, _layer(last, hidden, bias=True))


def _mpt(numbers: Transformer, _: Config) -> Shapes:
    hidden, ffn = numbers.hidden, numbers.ffn
    block = [
        *_layer("norm_1", hidden),
        *_layer("attn.Wqkv", 3 * hidden, hidden),
        *_layer("attn.out_proj", hidden, hidden),
        *_layer("norm_2", hidden),
        *_layer("ffn.up_proj", ffn, hidden),
        *_layer("ffn.down_proj", hidden, ffn),
    ]
    root = _layer("transformer.wte", numbers.vocabulary, hidden)
    return _decoder(numbers, root, "transformer.blocks", block, _layer("transformer.norm_f", hidden))


def _opt(numbers: Transformer, config: Config) -> Shapes:
    hidden, ffn, bias = numbers.hidden, numbers.ffn, numbers.qkv_bias
    embedding = config.get("word_embed_proj_dim") or hidden
    block = Shapes()
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        block += _layer(f"self_attn.{name}", hidden, hidden, bias=bias)
    norm = _layer("self_attn_layer_norm", hidden, bias=True) if numbers.norm_bias else []
    block += norm + _layer("fc1", ffn, hidden, bias=bias) + _layer("fc2", hidden, ffn, bias=bias)
    block += [(name.replace("self_attn", "final"), shape) for name, shape in norm]
    root = _layer("model.decoder.embed_tokens", numbers.vocabulary, embedding)
    root += _layer("model.decoder.embed_positions", numbers.positions + 2, hidden)  # the positions begin at 2
    if embedding != hidden:
        root += _layer("model.decoder.project_out", embedding, hidden)
        root += _layer("model.decoder.project_in", hidden, embedding)
    if numbers.norm_bias and config["do_layer_norm_before"] and not config.get("_remove_final_layer_norm"):
        root += _layer("model.decoder.final_layer_norm", hidden, bias=True)
    return _decoder(numbers, root, "model.decoder.layers", block, [])


def _falcon(numbers: Transformer, config: Config) -> Shapes:
    hidden, ffn, queries, keys = _widths(numbers)
    bias = numbers.qkv_bias
    block = [
        *_layer("self_attention.query_key_value", queries + 2 * keys, hidden, bias=bias),
        *_layer("self_attention.dense", hidden, hidden, bias=bias),
        *_layer("mlp.dense_h_to_4h", ffn, hidden, bias=bias),
        *_layer("mlp.dense_4h_to_h", hidden, ffn, bias=bias),
    ]
    if not config["parallel_attn"]:
        block += _layer("post_attention_layernorm", hidden, bias=True)
    for name in ("ln_attn", "ln_mlp") if _falcon_has_two_norms(config) else ("input_layernorm",):
        block += _layer(name, hidden, bias=True)
    root, last = _layer("transformer.word_embeddings", numbers.vocabulary, hidden), "transformer.ln_f"
    return _decoder(numbers, root, "transformer.h", block, _layer(last, hidden, bias=True))


def _falcon_heads(config: Config) -> int:
    heads: int = config["num_attention_heads"]
    if config.get("new_decoder_architecture") or not config.get("multi_query"):
        return config.get("num_kv_heads") or heads
    return 1


def _falcon_has_two_norms(config: Config) -> bool:
    norms = config.get("num_ln_in_parallel_attn") or (2 if config.get("new_decoder_architecture") else 1)
    return bool(config.get("parallel_attn")) and norms == 2


def _t5(numbers: Transformer, config: Config) -> Shapes:
    buckets = config["relative_attention_num_buckets"]
    encoder = _t5_stack("encoder", numbers.layers, ("SelfAttention",), numbers, buckets)
    decoder = _t5_stack("decoder", numbers.decoder_layers, ("SelfAttention", "EncDecAttention"), numbers, buckets)
    shared = numbers.vocabulary, numbers.hidden
    head = "shared.weight" if numbers.tied else shared
    return [("shared.weight", shared), *encoder, *decoder, ("lm_head.weight", head)]


def _t5_stack(stack: str, layers: int, attentions: tuple[str, ...], numbers: Transformer, buckets: int) -> Shapes:
    hidden, ffn, queries, _ = _widths(numbers)
    found: Shapes = [(f"{stack}.embed_tokens.weight", "shared.weight")]
    for block in range(layers):
        for number, attention in enumerate(attentions):
            layer = f"{stack}.block.{block}.layer.{number}"
            for name in "qkv":
                found += _layer(f"{layer}.{attention}.{name}", queries, hidden)
            found += _layer(f"{layer}.{attention}.o", hidden, queries)
            if not number and not block:
                found += _layer(f"{layer}.{attention}.relative_attention_bias", buckets, numbers.heads)
            found += _layer(f"{layer}.layer_norm", hidden)
        layer = f"{stack}.block.{block}.layer.{len(attentions)}"
        for name in ("wi_0", "wi_1") if numbers.gated else ("wi",):
            found += _layer(f"{layer}.DenseReluDense.{name}", ffn, hidden)
        found += _layer(f"{layer}.DenseReluDense.wo", hidden, ffn) + _layer(f"{layer}.layer_norm", hidden)
    return found + _layer(f"{stack}.final_layer_norm", hidden)


def _is(key: str) -> Callable[[Config], bool]:
    return lambda config: bool(config.get(key))


_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True}
_ATTENTION_BIAS = {"qkv_bias": _is("attention_bias"), "out_bias": _is("attention_bias")}
_MISTRAL = {"norm": "rms", "gated": True, "activation": "silu", "rotary": True}
_QWEN3 = {**_MISTRAL, **_ATTENTION_BIAS}
_LLAMA = {**_QWEN3, "mlp_bias": _is("mlp_bias")}

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(_llama, _UNTIED, _LLAMA),
    "mistral": Family(_llama, _UNTIED, _MISTRAL),
    "qwen2": Family(_llama, _UNTIED, {**_MISTRAL, "qkv_bias": True}),
    "qwen3": Family(_llama, {**_UNTIED, "head_dim": 128}, {**_QWEN3, "head_norms": True}),
    "gemma": Family(_llama, {**_TIED, "head_dim": 256}, {**_QWEN3, "activation": "gelu"}),
    "phi3": Family(_phi3, _UNTIED, _MISTRAL),
    "gpt2": Family(_gpt2, {**_TIED, "n_positions": 1024}, {**_BIASED, "learned": True}),
    "gpt_neox": Family(_gpt_neox, {**_UNTIED, "attention_bias": True}, {**_BIASED, **_ATTENTION_BIAS, "rotary": True}),
    "mpt": Family(_mpt, {**_TIED, "expansion_ratio": 4}),
    "opt": Family(
        _opt,
        {**_TIED, "enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True},
        {
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), _is("enable_bias")),
            "norm_bias": _is("layer_norm_elementwise_affine"),
            "activation": "relu",
            "learned": True,
        },
    ),
    "falcon": Family(
        _falcon,
        {**_TIED, "multi_query": True, "parallel_attn": True, "bias": False},
        {
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), _is("bias")),
            "kv_heads": _falcon_heads,
            "rotary": lambda config: not config.get("alibi"),
            "norms": lambda config: 2 if _falcon_has_two_norms(config) or not config["parallel_attn"] else 1,
            "norm_bias": True,
        },
    ),
    "t5": Family(
        _t5,
        {**_TIED, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu"},
        {
            "decoder_layers": lambda config: config.get("num_decoder_layers") or config["num_layers"],
            "norm": "rms",
            "gated": lambda config: config["feed_forward_proj"].startswith("gated"),
            "activation": lambda config: config["feed_forward_proj"].rpartition("-")[2].partition("_")[0],
            "attention": "eager",  # a bias of relative positions is added to each score
        },
    ),
    "olmo": Family(_llama, _UNTIED, {**_QWEN3, "norm": "plain"}),
    "granite": Family(_llama, _UNTIED, _LLAMA),
    "smollm3": Family(_llama, _TIED, _LLAMA),
}


UNITS: Final = re.compile(r"(?:.*?\.)?\d+(?=\.)")  # the outermost list: everything up to the first number
LONGEST_HEADER: Final = 100_000_000  # bytes; the limit of the format itself
_FLOATS: Final = {"float64", "float32", "float16", "bfloat16", "f64", "f32", "f16", "bf16"}

_Entry = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def of_parameter_list(path: str | Path) -> Model:
    """Return the model of a list of parameters. Its work is not known.

    Args:
        path: a safetensors file, a `...safetensors.index.json` with its files beside it, or text with a line
            ``name shape dtype`` for each parameter, such as ``h.0.weight 768x768 float32``. Lines that begin with #
            are comments. Lines are in order of registration; a safetensors file does not keep that order, so its
            tensors are sorted by name, numbers by value.

    Raises:
        ValueError: the file cannot be read or has no parameter, or a line has another form.
    """
    path = Path(path)
    entries = [(name, shape) for name, shape, dtype in _entries(path) if dtype.lower() in _FLOATS]
    if not entries:
        raise ValueError(f"{path} has no tensor of a float dtype: name a file that lists parameters")
    return in_units(path.name, entries)


def in_units(name: str, entries: Iterable[tuple[str, tuple[int, ...] | str]]) -> Model:
    """Return the model of named shapes, which a unit is everything up to the first number of: a member of a list.

    ``entries``: a parameter's name, and its shape or the name of the parameter of which it is another name.
    """
    numbers: dict[str, int] = {}
    parameters: list[ParameterShape] = []
    places: dict[str, int] = {}
    for key, shape in entries:
        if isinstance(shape, str):
            first = parameters[places[shape]]
            parameters[places[shape]] = replace(first, names=(*first.names, key))
            continue
        found = UNITS.match(key)
        places[key] = len(parameters)
        unit = numbers.setdefault(found.group(), len(numbers) + 1) if found else ROOT
        parameters.append(ParameterShape((key,), shape, unit))
    return Model(name, tuple(parameters), (ROOT_NAME, *numbers))


def _entries(path: Path) -> list[_Entry]:
    """Return name, shape and dtype of each entry of a file."""
    try:
        if path.suffix == ".safetensors":
            return _sorted(_header(path))
        if path.suffix == ".json":
            files = sorted(set(_json(path.read_bytes(), path)["weight_map"].values()))
            return _sorted(entry for file in files for entry in _header(path.parent / Path(file).name))
        return list(_lines(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path} is no list of parameters: it must be a safetensors file, an index of some with a 'weight_map', "
            "or lines 'name shape dtype'"
        ) from None


def _sorted(entries: Iterator[_Entry]) -> list[_Entry]:
    """Return entries by name, numbers in names by value."""

    def key(entry: _Entry) -> list[tuple[int, str]]:
        return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", entry[0])]

    return sorted(entries, key=key)


def _header(path: Path) -> Iterator[_Entry]:
    """Yield the entries of the header of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes")
        header = _json(file.read(length), path)
    for name, described in header.items():
        if name != "__metadata__":
            yield name, tuple(int(size) for size in described["shape"]), str(described["dtype"])


def _json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read, since it holds no JSON where some should be: {error}") from None
    if not isinstance(found, dict):
        raise TypeError
    return found


def _lines(path: Path) -> Iterator[_Entry]:
    """Yield the entries of lines ``name shape dtype``."""
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, rest = text.partition(" ")
        shape, _, dtype = rest.strip().rpartition(" ")
        sizes = [int(size) for size in re.findall(r"\d+", shape)]
        if not re.fullmatch(r"(torch\.)?[a-z]+\d*", dtype) or not re.fullmatch(r"[\[(]?[\dx, ]*[\])]?", shape.strip()):
            raise ValueError(
                f"{path}, line {number}: {text!r} is not 'name shape dtype', such as 'h.0.weight 768x768 float32'"
            )
        if not shape.strip() or math.prod(sizes) < 1:
            raise ValueError(f"{path}, line {number}: {name!r} has no elements: write its shape, () if it is a scalar")
        yield name, tuple(sizes), dtype.removeprefix("torch.")


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
    return from_config(config, str(config.get("_name_or_path") or _name(path, config)), str(file))


def _name(path: Path, config: Mapping[str, Any]) -> str:
    """Return a model's name: that of its folder or file, as the user gave it, or its class if that is a config.json."""
    if path.is_dir():
        return path.resolve().name
    classes = config.get("architectures")
    return str(classes[0]) if path.stem == "config" and isinstance(classes, list) and classes else path.stem


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
    return replace(model, transformer=numbers)


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
