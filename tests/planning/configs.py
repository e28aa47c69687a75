"""Published configs, with the keys that decide shapes, and the number of parameters of each model.

Configs: `config.json` of each repository on Hugging Face. Numbers: those of the models of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def llama(kind: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, words: int, **more: Any) -> Config:
    keys = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    keys |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": words}
    return {"model_type": kind, **keys, **more}


SMALL = llama("llama", 4, 256, 4, 2, 704, 1000)
LLAMA_3_8B = llama("llama", 32, 4096, 32, 8, 14336, 128256)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
NEOX = {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64}
MPT = {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432, "max_seq_len": 2048}
OPT = {"model_type": "opt", "num_hidden_layers": 24, "vocab_size": 50272, "max_position_embeddings": 2048}
OPT_1_3B = {**OPT, "hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_attention_heads": 32}
OPT_350M = {**OPT, "hidden_size": 1024, "word_embed_proj_dim": 512, "ffn_dim": 4096, "num_attention_heads": 16}
FALCON_7B = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}
FALCON_40B = {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
FALCON_1B = {"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32}
FLAN_T5_XL = {"model_type": "t5", "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32}

PUBLISHED: dict[str, tuple[Config, int]] = {
    "Llama-3.1-8B": (LLAMA_3_8B, 8_030_261_248),
    "Mistral-7B-v0.1": (llama("mistral", 32, 4096, 32, 8, 14336, 32000), 7_241_732_096),
    "Qwen2-7B": (llama("qwen2", 28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen3-8B": (llama("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "gemma-7b": (llama("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256), 8_537_680_896),
    "Phi-3-mini-4k-instruct": (llama("phi3", 32, 3072, 32, 32, 8192, 32064), 3_821_079_552),
    "OLMo-7B-hf": (llama("olmo", 32, 4096, 32, 32, 11008, 50304), 6_888_095_744),
    "granite-3.1-8b-base": (llama("granite", 40, 4096, 32, 8, 12800, 49155, tie_word_embeddings=True), 8_170_848_256),
    "SmolLM3-3B": (llama("smollm3", 36, 2048, 16, 4, 11008, 128256), 3_075_098_624),
    "gpt2": (GPT2, 124_439_808),
    "gpt-neox-20b": ({**NEOX, "intermediate_size": 24576, "vocab_size": 50432}, 20_554_567_680),
    "mpt-7b": (MPT, 6_649_286_656),
    "opt-1.3b": (OPT_1_3B, 1_315_758_080),
    "opt-350m": ({**OPT_350M, "do_layer_norm_before": False}, 331_196_416),
    "falcon-7b": (
        {**FALCON_7B, "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False},
        6_921_720_704,
    ),
    "falcon-40b": (
        {**FALCON_40B, "vocab_size": 65024, "num_kv_heads": 8, "new_decoder_architecture": True, "bias": False},
        41_303_293_952,
    ),
    "falcon-rw-1b": (
        {**FALCON_1B, "vocab_size": 50304, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        1_311_625_216,
    ),
    "flan-t5-xl": (  # its decoder's embedding stays the encoder's
        {**FLAN_T5_XL, "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        2_849_757_184,
    ),
}
