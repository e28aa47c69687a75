"""Models of transformers built without memory have the bits of `from_pretrained`, whatever the names in their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ...contract.recipes import assert_same_dict
from .ecosystem import WORLD_SIZE

transformers = pytest.importorskip("transformers")
from zero.integrations.transformers import init_of, weights_of  # noqa: E402 - needs transformers

pytestmark = pytest.mark.timeout(300)
MOE = "Qwen3MoeForCausalLM"
_DECODER: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {**_DECODER, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_IMAGES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "LlavaForConditionalGeneration": {
        "text_config": {**_DECODER, "model_type": "llama"},
        "vision_config": {**_IMAGES, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"},
        "image_token_index": 30,
    },
    "MixtralForCausalLM": _EXPERTS,
    MOE: {**_EXPERTS, "head_dim": 4, "moe_intermediate_size": 8},
    "T5ForConditionalGeneration": {
        "vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4
    },
}  # fmt: skip
"""Tied weights, models inside a model, and experts: each kind of rules that the library has, and several at once."""
RENAMED = {"LlavaForConditionalGeneration", "MixtralForCausalLM", MOE}
"""Those whose files have other names than the model."""


def saved(folder: Path, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Write a model of random values, also of those that an initialisation would set to 0 or 1; return its class."""
    found = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = found(found.config_class(**ARCHITECTURES[name])).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    model.save_pretrained(folder, **options)
    return found


def on_meta(found: Any, folder: Path) -> Any:
    with torch.device("meta"):
        return found._from_config(found.config_class.from_pretrained(folder))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


def assert_built(found: Any, folder: Path) -> None:
    """Build a model of a folder on two ranks at stage 3, and compare it with what `from_pretrained` returns."""
    expected = tensors_of(found.from_pretrained(folder))
    models = [on_meta(found, folder) for _ in range(WORLD_SIZE)]  # here: the library sets the default dtype of all

    def build(transport: Transport) -> dict[str, Tensor]:
        model = models[transport.rank]
        given = {"param_init_fn": init_of(model), "init_state_dict": weights_of(model, folder)}
        ZeroOptimizer(model, torch.optim.AdamW, stage=3, process_group=transport, lr=1e-2, **given).close()
        return tensors_of(model)

    for state in on_threads(WORLD_SIZE, build):
        assert_same_dict(state, expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_has_the_bits_of_from_pretrained(name: str, tmp_path: Path) -> None:
    found = saved(tmp_path, name)
    written = load_file(tmp_path / "model.safetensors")
    assert (set(written) <= set(on_meta(found, tmp_path).state_dict())) is (name not in RENAMED)
    assert_built(found, tmp_path)


def test_weights_in_16_bits_and_in_several_files_are_converted_as_well(tmp_path: Path) -> None:
    found = saved(tmp_path, MOE, torch.bfloat16, max_shard_size="3KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_built(found, tmp_path)


@pytest.mark.filterwarnings("ignore:.*weights_of leaves out")
def test_a_model_is_built_from_the_folder_of_one_with_another_head(tmp_path: Path) -> None:
    saved(tmp_path, MOE)
    with pytest.warns(UserWarning, match=r"the model lacks lm_head.weight, which weights_of leaves out"):
        weights_of(on_meta(transformers.Qwen3MoeModel, tmp_path), tmp_path)
    assert_built(transformers.Qwen3MoeModel, tmp_path)
    assert_built(getattr(transformers, MOE), tmp_path)
    inner = transformers.Qwen3MoeModel.from_pretrained(tmp_path)
    inner.save_pretrained(tmp_path / "inner")
    model = on_meta(getattr(transformers, MOE), tmp_path / "inner")
    assert set(model.state_dict()) - set(weights_of(model, tmp_path / "inner")) == {"lm_head.weight"}


def test_a_tensor_is_read_alone_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(saved(tmp_path, MOE), tmp_path)
    weights = weights_of(model, tmp_path)
    read: list[str] = []
    kind = type(weights._source)  # type: ignore[attr-defined]
    real = kind.__getitem__
    monkeypatch.setattr(kind, "__getitem__", lambda self, name: (read.append(name), real(self, name))[1])
    assert weights["model.layers.1.mlp.experts.down_proj"].shape == (4, 16, 8)
    assert read == [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]


def edit(folder: Path, name: str, edits: dict[str, Any]) -> Any:
    """Save a model, change its file (None: take away), and return it on the meta device."""
    found = saved(folder, name)
    file = folder / "model.safetensors"
    values = {**load_file(file), **edits}
    save_file({name: value for name, value in values.items() if value is not None}, file, {"format": "pt"})
    return on_meta(found, folder)


EXPERT = "model.layers.0.mlp.experts.2.gate_proj.weight"
NORM = "model.norm.weight"
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "a lost expert": (MOE, {EXPERT: None}, r"'model.layers.0.mlp.experts.gate_up_proj' cannot be made of .*from_pretr"),
    "another shape": (MOE, {NORM: torch.ones(3)}, r"'model.norm.weight' has shape \(16,\), but \(3,\) in the files"),
    "two values of a tie": ("GPT2LMHeadModel", {"lm_head.weight": torch.ones(31, 16)}, "differ in the files: set con"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_converted_is_named_with_the_remedy(case: str, tmp_path: Path) -> None:
    name, edits, words = UNFIT[case]
    model = edit(tmp_path, name, edits)
    with pytest.raises(ValueError, match=words):
        weights_of(model, tmp_path)


def test_other_models_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"for a PreTrainedModel of transformers, not for a Linear"):
        weights_of(nn.Linear(2, 2), tmp_path)
    found = saved(tmp_path, "T5ForConditionalGeneration", torch.float16)
    with pytest.raises(ValueError, match=r"wo.weight' is torch.float16, but from_pretrained keeps it in torch.float32"):
        weights_of(on_meta(found, tmp_path), tmp_path)
    model = on_meta(saved(tmp_path, "GPT2LMHeadModel"), tmp_path)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"^weights_of: '.*model.safetensors' cannot be read"):
        weights_of(model, tmp_path / "cut")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="are quantised: load it by from_pretrained"):
        weights_of(model, tmp_path)
    with pytest.raises(ValueError, match=r"init_of is for a PreTrainedModel of transformers, not for a Linear"):
        init_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"init_of was given another model: give it the one that"):
        ZeroOptimizer(model, process_group=solo(), param_init_fn=init_of(on_meta(type(model), tmp_path)))
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    del model.config.quantization_config
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json: load it by"):
        weights_of(model, tmp_path)
    with pytest.raises(ValueError, match=r"owner/model is no folder: give the local one, as huggingface_hub"):
        weights_of(model, "owner/model")
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(ValueError, match=r"model.safetensors.index.json is no index of files .KeyError: 'weight_map'"):
        weights_of(model, tmp_path)
