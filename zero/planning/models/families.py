"""The shapes of known language models: for each `model_type` of a Hugging Face `config.json` its parameters.

Knows: names and shapes in order of registration, the defaults of keys that a config may leave out, and the traits of a
block. Does not know: how a config is read, units, work.

Sources: the classes `...ForCausalLM` (T5: `T5ForConditionalGeneration`) of transformers 5.24, and their configs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..model import Transformer

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
