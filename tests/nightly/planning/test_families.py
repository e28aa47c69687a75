"""What the planner reads from a config is the model that transformers builds from it, parameter by parameter."""

from __future__ import annotations

import os

import pytest
import torch

from zero.planning.models.shapes import from_config, model_of

from ...planning.configs import PUBLISHED, Config, llama

os.environ["HF_HUB_OFFLINE"] = "1"  # forbid downloads

BIASED = dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), True) | {"pad_token_id": None}
SMALL: dict[str, Config] = {
    f"{kind} with biases": llama(kind, 2, 64, 4, 2, 100, 50, head_dim=16, **BIASED)
    for kind in ("llama", "qwen3", "gemma", "olmo", "granite", "smollm3")
} | {
    "gpt_neox without biases": {**PUBLISHED["gpt-neox-20b"][0], "num_hidden_layers": 2, "attention_bias": False},
    "opt without biases": {**PUBLISHED["opt-1.3b"][0], "num_hidden_layers": 2, "enable_bias": False}
    | {"layer_norm_elementwise_affine": False},
    "t5 gated": {**PUBLISHED["t5-small"][0], "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
}


def built(config: Config) -> torch.nn.Module:
    """Return the model of transformers for a config, on the meta device."""
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**config)
    kind = transformers.T5ForConditionalGeneration if made.model_type == "t5" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: torch.nn.Module = kind(made) if made.model_type == "t5" else kind.from_config(made)
    return model


@pytest.mark.timeout(300)  # such libraries are slow
@pytest.mark.parametrize("name", [*PUBLISHED, *SMALL])
def test_names_shapes_ties_order_and_units_are_those_of_transformers(name: str) -> None:
    config = SMALL[name] if name in SMALL else PUBLISHED[name][0]
    theirs, ours = model_of(built(config), name), from_config(config, name)
    assert ours.units == theirs.units
    assert ours.parameters == theirs.parameters
