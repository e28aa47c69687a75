"""Small models of many architectures of transformers, by the class that builds each."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
_DECODER = {**_SIZES, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_HEADS = {**_DECODER, "head_dim": 4}
_IMAGES = {**_SIZES, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
_LATENT = {
    **_DECODER, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
_SPEECH = {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 16,
    "max_target_positions": 16, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": _SIZES,
    "DeepseekV3ForCausalLM": _LATENT,
    "GPT2LMHeadModel": {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "GPTNeoXForCausalLM": _SIZES,
    "Gemma3ForCausalLM": _HEADS,
    "LlamaForCausalLM": _DECODER,
    "LlavaForConditionalGeneration": {
        "text_config": {**_DECODER, "model_type": "llama"},
        "vision_config": {**_IMAGES, "model_type": "clip_vision_model"},
        "image_token_index": 30,
    },
    "MixtralForCausalLM": {**_DECODER, **_EXPERTS},
    "NomicBertForMaskedLM": _SIZES,
    "OPTForCausalLM": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "Qwen2MoeForCausalLM": {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 8},
    "Qwen3ForCausalLM": _HEADS,
    "Qwen3MoeForCausalLM": {**_HEADS, **_EXPERTS},
    "T5ForConditionalGeneration": {
        "vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4
    },
    "ViTForImageClassification": _IMAGES,
    "WhisperForConditionalGeneration": _SPEECH,
}  # fmt: skip
RENAMED = {
    "DeepseekV3ForCausalLM", "GPTNeoXForCausalLM", "MixtralForCausalLM", "NomicBertForMaskedLM", "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM", "ViTForImageClassification", "LlavaForConditionalGeneration",
}  # fmt: skip
"""Those whose files have other names than the model."""
