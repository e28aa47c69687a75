"""The shapes of known language models, as data: for each `model_type` of a Hugging Face `config.json` its parameters.

Knows: names and shapes in order of registration, the defaults of keys that a config may leave out, and the traits of a
block. Does not know: how a config is read, units, work.

A line of `parameters` is ``name  sizes  [?condition ...]  [= other or == other]``:

    *            is the number of a block; consecutive lines with one prefix are repeated for each block
    sizes        are names of `Sizes`, or products such as 3*hidden
    ?key         the parameter exists if this key of the config (or of `derived`) is true; ?!key, if it is not
    ?first       the parameter exists in the first block of its list alone
    = other      the parameter is another name of ``other`` if the config ties the embedding and the head
    == other     the parameter is another name of ``other``

Sources: the classes `...ForCausalLM` (T5: `T5ForConditionalGeneration`) of transformers 5.24, and their configs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Config = Mapping[str, Any]

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
        parameters: the lines that this module's docstring describes.
        defaults: keys that a config may leave out.
        derived: further sizes and conditions, computed from the config with its defaults.
        traits: fields of `Transformer` that are the same for all, or computed from the config with its defaults.
    """

    parameters: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)


def _is(key: str) -> Callable[[Config], bool]:
    return lambda config: bool(config.get(key))


def _norms(name: str, condition: str = "") -> str:
    return f"{name}.weight hidden {condition}\n{name}.bias hidden {condition}\n"


def _linear(name: str, sizes: str, bias: str | None = "") -> str:
    """Return the lines of a linear layer. ``bias``: the condition of its bias; None if there is none."""
    lines = f"{name}.weight {sizes}\n"
    return lines if bias is None else f"{lines}{name}.bias {sizes.split()[0]} {bias}\n"


def _llama(
    qkv: str | None = None, out: str | None = None, mlp: str | None = None, inside: str = "", norm: bool = True
) -> str:
    """Return the lines of Llama's modules. The first three are the conditions of biases."""
    block = "model.layers.*"
    lines = ["model.embed_tokens.weight vocabulary hidden\n"]
    lines += [_linear(f"{block}.self_attn.{n}_proj", f"{size} hidden", qkv) for n, size in (("q", "q"), *_KEY_VALUE)]
    lines += [_linear(f"{block}.self_attn.o_proj", "hidden q", out), inside]
    lines += [_linear(f"{block}.mlp.{n}_proj", "ffn hidden", mlp) for n in ("gate", "up")]
    lines += [_linear(f"{block}.mlp.down_proj", "hidden ffn", mlp)]
    if norm:
        lines += [f"{block}.{n}_layernorm.weight hidden\n" for n in ("input", "post_attention")]
        lines += ["model.norm.weight hidden\n"]
    return "".join(lines) + "lm_head.weight vocabulary hidden = model.embed_tokens.weight\n"


_KEY_VALUE = (("k", "kv"), ("v", "kv"))
_LLAMA = {"norm": "rms", "gated": True, "activation": "silu", "rotary": True}
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True}
_ATTENTION_BIAS = {"qkv_bias": _is("attention_bias"), "out_bias": _is("attention_bias")}

_PHI3 = (
    "model.embed_tokens.weight vocabulary hidden\n"
    "model.layers.*.self_attn.o_proj.weight hidden q\n"
    "model.layers.*.self_attn.qkv_proj.weight q+2*kv hidden\n"
    "model.layers.*.mlp.gate_up_proj.weight 2*ffn hidden\n"
    "model.layers.*.mlp.down_proj.weight hidden ffn\n"
    "model.layers.*.input_layernorm.weight hidden\n"
    "model.layers.*.post_attention_layernorm.weight hidden\n"
    "model.norm.weight hidden\n"
    "lm_head.weight vocabulary hidden = model.embed_tokens.weight\n"
)

_GPT2 = (
    "transformer.wte.weight vocabulary hidden\n"
    "transformer.wpe.weight positions hidden\n"
    + _norms("transformer.h.*.ln_1")
    + "transformer.h.*.attn.c_attn.weight hidden 3*hidden\n"  # Conv1D keeps (in, out)
    "transformer.h.*.attn.c_attn.bias 3*hidden\n"
    "transformer.h.*.attn.c_proj.weight hidden hidden\n"
    "transformer.h.*.attn.c_proj.bias hidden\n"
    + _norms("transformer.h.*.ln_2")
    + "transformer.h.*.mlp.c_fc.weight hidden ffn\n"
    "transformer.h.*.mlp.c_fc.bias ffn\n"
    "transformer.h.*.mlp.c_proj.weight ffn hidden\n"
    "transformer.h.*.mlp.c_proj.bias hidden\n"
    + _norms("transformer.ln_f")
    + "lm_head.weight vocabulary hidden = transformer.wte.weight\n"
)

_GPT_NEOX = (
    "gpt_neox.embed_in.weight vocabulary hidden\n"
    + _norms("gpt_neox.layers.*.input_layernorm")
    + _norms("gpt_neox.layers.*.post_attention_layernorm")
    + _linear("gpt_neox.layers.*.attention.query_key_value", "3*hidden hidden", "?attention_bias")
    + _linear("gpt_neox.layers.*.attention.dense", "hidden hidden", "?attention_bias")
    + _linear("gpt_neox.layers.*.mlp.dense_h_to_4h", "ffn hidden")
    + _linear("gpt_neox.layers.*.mlp.dense_4h_to_h", "hidden ffn")
    + _norms("gpt_neox.final_layer_norm")
    + "lm_head.weight vocabulary hidden = gpt_neox.embed_in.weight\n"
)

_MPT = (
    "transformer.wte.weight vocabulary hidden\n"
    "transformer.blocks.*.norm_1.weight hidden\n"
    "transformer.blocks.*.attn.Wqkv.weight 3*hidden hidden\n"
    "transformer.blocks.*.attn.out_proj.weight hidden hidden\n"
    "transformer.blocks.*.norm_2.weight hidden\n"
    "transformer.blocks.*.ffn.up_proj.weight ffn hidden\n"
    "transformer.blocks.*.ffn.down_proj.weight hidden ffn\n"
    "transformer.norm_f.weight hidden\n"
    "lm_head.weight vocabulary hidden = transformer.wte.weight\n"
)

_OPT = (
    "model.decoder.embed_tokens.weight vocabulary embedding\n"
    "model.decoder.embed_positions.weight positions+2 hidden\n"  # two rows more: the positions begin at 2
    "model.decoder.project_out.weight embedding hidden ?projected\n"
    "model.decoder.project_in.weight hidden embedding ?projected\n"
    + _norms("model.decoder.final_layer_norm", "?last_norm ?layer_norm_elementwise_affine")
    + "".join(_linear(f"model.decoder.layers.*.self_attn.{n}_proj", "hidden hidden", "?enable_bias") for n in "kvq")
    + _linear("model.decoder.layers.*.self_attn.out_proj", "hidden hidden", "?enable_bias")
    + _norms("model.decoder.layers.*.self_attn_layer_norm", "?layer_norm_elementwise_affine")
    + _linear("model.decoder.layers.*.fc1", "ffn hidden", "?enable_bias")
    + _linear("model.decoder.layers.*.fc2", "hidden ffn", "?enable_bias")
    + _norms("model.decoder.layers.*.final_layer_norm", "?layer_norm_elementwise_affine")
    + "lm_head.weight vocabulary embedding = model.decoder.embed_tokens.weight\n"
)

_FALCON = (
    "transformer.word_embeddings.weight vocabulary hidden\n"
    + _linear("transformer.h.*.self_attention.query_key_value", "q+2*kv hidden", "?bias")
    + _linear("transformer.h.*.self_attention.dense", "hidden hidden", "?bias")
    + _linear("transformer.h.*.mlp.dense_h_to_4h", "ffn hidden", "?bias")
    + _linear("transformer.h.*.mlp.dense_4h_to_h", "hidden ffn", "?bias")
    + _norms("transformer.h.*.ln_attn", "?apart")
    + _norms("transformer.h.*.ln_mlp", "?apart")
    + _norms("transformer.h.*.post_attention_layernorm", "?!parallel_attn")
    + _norms("transformer.h.*.input_layernorm", "?!apart")
    + _norms("transformer.ln_f")
    + "lm_head.weight vocabulary hidden = transformer.word_embeddings.weight\n"
)


def _t5(stack: str, attentions: tuple[str, ...]) -> str:
    layer = f"{stack}.block.*.layer"
    lines = [f"{stack}.embed_tokens.weight vocabulary hidden == shared.weight\n"]
    for number, attention in enumerate(attentions):
        lines += [f"{layer}.{number}.{attention}.{n}.weight q hidden\n" for n in "qkv"]
        lines += [f"{layer}.{number}.{attention}.o.weight hidden q\n"]
        if attention == "SelfAttention":
            name = f"{layer}.{number}.{attention}.relative_attention_bias.weight"
            lines += [f"{name} buckets heads ?first\n"]
        lines += [f"{layer}.{number}.layer_norm.weight hidden\n"]
    number, dense = len(attentions), f"{layer}.{len(attentions)}.DenseReluDense"
    lines += [f"{dense}.wi.weight ffn hidden ?!is_gated_act\n"]
    lines += [f"{dense}.wi_{n}.weight ffn hidden ?is_gated_act\n" for n in (0, 1)]
    lines += [f"{dense}.wo.weight hidden ffn\n", f"{layer}.{number}.layer_norm.weight hidden\n"]
    return "".join([*lines, f"{stack}.final_layer_norm.weight hidden\n"])


_T5 = (
    "shared.weight vocabulary hidden\n"
    + _t5("encoder", ("SelfAttention",))
    + _t5("decoder", ("SelfAttention", "EncDecAttention"))
    + "lm_head.weight vocabulary hidden = shared.weight\n"
)


def _falcon_heads(config: Config) -> int:
    heads: int = config["num_attention_heads"]
    if config.get("new_decoder_architecture") or not config.get("multi_query"):
        return config.get("num_kv_heads") or heads
    return 1


def _falcon_has_two_norms(config: Config) -> bool:
    norms = config.get("num_ln_in_parallel_attn") or (2 if config.get("new_decoder_architecture") else 1)
    return bool(config.get("parallel_attn")) and norms == 2


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(
        _llama("?attention_bias", "?attention_bias", "?mlp_bias"),
        _UNTIED,
        traits={**_LLAMA, **_ATTENTION_BIAS, "mlp_bias": _is("mlp_bias")},
    ),
    "mistral": Family(_llama(), _UNTIED, traits=_LLAMA),
    "qwen2": Family(_llama(""), _UNTIED, traits={**_LLAMA, "qkv_bias": True}),
    "qwen3": Family(
        _llama(
            "?attention_bias",
            "?attention_bias",
            inside="model.layers.*.self_attn.q_norm.weight head_dim\nmodel.layers.*.self_attn.k_norm.weight head_dim\n",
        ),
        {**_UNTIED, "head_dim": 128},
        traits={**_LLAMA, **_ATTENTION_BIAS, "head_norms": True},
    ),
    "gemma": Family(
        _llama("?attention_bias", "?attention_bias"),
        {**_TIED, "head_dim": 256},
        traits={**_LLAMA, **_ATTENTION_BIAS, "activation": "gelu"},
    ),
    "phi3": Family(_PHI3, _UNTIED, traits=_LLAMA),
    "gpt2": Family(_GPT2, {**_TIED, "n_positions": 1024}, traits={**_BIASED, "learned": True}),
    "gpt_neox": Family(
        _GPT_NEOX,
        {**_UNTIED, "attention_bias": True},
        traits={**_BIASED, **_ATTENTION_BIAS, "rotary": True},
    ),
    "mpt": Family(_MPT, {**_TIED, "expansion_ratio": 4}),
    "opt": Family(
        _OPT,
        {**_TIED, "enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True},
        {
            "embedding": lambda config: config.get("word_embed_proj_dim") or config["hidden_size"],
            "projected": lambda config: (
                config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]
            ),
            "last_norm": lambda config: config["do_layer_norm_before"] and not config.get("_remove_final_layer_norm"),
        },
        {**_BIASED, **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), _is("enable_bias"))}
        | {"norm_bias": _is("layer_norm_elementwise_affine"), "activation": "relu", "learned": True},
    ),
    "falcon": Family(
        _FALCON,
        {**_TIED, "multi_query": True, "parallel_attn": True, "bias": False},
        {"kv_heads": _falcon_heads, "apart": _falcon_has_two_norms},
        {
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), _is("bias")),
            "rotary": lambda config: not config.get("alibi"),
            "norms": lambda config: 2 if _falcon_has_two_norms(config) or not config["parallel_attn"] else 1,
            "norm_bias": True,
        },
    ),
    "t5": Family(
        _T5,
        {**_TIED, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu"},
        {
            "buckets": lambda config: config["relative_attention_num_buckets"],
            "is_gated_act": lambda config: config["feed_forward_proj"].startswith("gated"),
            "decoder_layers": lambda config: config.get("num_decoder_layers") or config["num_layers"],
        },
        {
            "norm": "rms",
            "gated": lambda config: config["feed_forward_proj"].startswith("gated"),
            "activation": lambda config: config["feed_forward_proj"].rpartition("-")[2].partition("_")[0],
            "attention": "eager",  # a bias of relative positions is added to each score
        },
    ),
    "olmo": Family(
        _llama("?attention_bias", "?attention_bias", norm=False),
        _UNTIED,
        traits={**_LLAMA, **_ATTENTION_BIAS, "norm": "plain"},
    ),
    "granite": Family(
        _llama("?attention_bias", "?attention_bias", "?mlp_bias"),
        _UNTIED,
        traits={**_LLAMA, **_ATTENTION_BIAS, "mlp_bias": _is("mlp_bias")},
    ),
    "smollm3": Family(
        _llama("?attention_bias", "?attention_bias", "?mlp_bias"),
        _TIED,
        traits={**_LLAMA, **_ATTENTION_BIAS, "mlp_bias": _is("mlp_bias")},
    ),
}
