"""A model's description, from whatever it is given: exact names, shapes, units and counts, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.plan.rows import from_numbers
from zero.commands.train.model import GPT, PRESETS
from zero.core.buckets import build
from zero.core.parameter_specs import specs
from zero.core.units import find_units
from zero.planning.model import Transformer
from zero.planning.models.families import FAMILIES
from zero.planning.models.reference import ReferenceModel
from zero.planning.models.shapes import from_config, model_of, of_config

from .configs import GPT2, LLAMA_3_8B, PUBLISHED, of_numbers


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.by_default
def test_published_configs_have_their_published_number_of_parameters(name: str) -> None:
    config, numel = PUBLISHED[name]
    model = from_config(config, name)
    assert model.numel == numel == sum(model.unit_numels())
    assert len(model.units) == 1 + len({p.unit for p in model.parameters if p.unit})


def test_every_known_type_has_a_published_config() -> None:
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == FAMILIES.keys()


def test_an_untied_head_is_a_parameter_of_its_own() -> None:
    """The published number of flan-t5-xl, whose decoder's embedding stays the encoder's."""
    sizes = {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32, "vocab_size": 32128}
    config = {"model_type": "t5", **sizes, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model = from_config(config, "flan-t5-xl")
    assert model.numel == 2_849_757_184
    assert model.parameters[-1].names == ("lm_head.weight",)
    assert model.parameters[0].names == tuple(
        f"{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    )


def test_a_config_is_read_from_its_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    model = of_config(folder)
    assert model == of_config(folder / "config.json")
    assert (model.name, model.numel, len(model.units)) == ("Llama-3.1-8B", 8_030_261_248, 33)
    assert (model.hidden, model.vocabulary) == (4096, 128256)
    assert model.units[1] == "model.layers.0"
    assert [p.names for p in model.parameters if p.unit == 0] == [
        ("model.embed_tokens.weight",),
        ("model.norm.weight",),
        ("lm_head.weight",),
    ]


def test_ties_are_further_names_of_one_parameter() -> None:
    first = from_config(GPT2, "gpt2").parameters[0]
    assert first.names == ("transformer.wte.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, r"'lama' is unknown \(did you mean 'llama'\?\); known are .*gpt_neox.*--parameters"),
        ({"model_type": None}, "model_type None is unknown; known are"),
        ({"num_local_experts": 8}, "num_local_experts is 8, and experts are not planned.*--parameters"),
        ({"hidden_size": None}, "none of the keys hidden_size, n_embd, d_model"),
        ({"num_attention_heads": 33}, "33 heads do not divide hidden 4096"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', and must be a positive integer"),
        ({"num_key_value_heads": 5}, "kv_heads 5 do not divide 32 heads"),
    ],
)
@pytest.mark.by_default
def test_a_config_that_cannot_be_planned_is_named(change: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**LLAMA_3_8B, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        from_config(config, "changed", "config.json")


@pytest.mark.parametrize("text", ["", "[1]", "{", None])
def test_a_file_that_is_no_config_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json (cannot be read|is no config)"):
        of_config(tmp_path)


# -- plain numbers -----------------------------------------------------------------------------------------------------

# Rows of published measurements: layers, hidden, heads, kv_heads, ffn, gated, vocabulary, tied, positions, parameters.
# MosaicML llm-foundry (scripts/train/benchmarking), whose MPTs have learned positions and every bias; torchtitan.
ROWS = [
    ("MPT-125m", 12, 768, 12, 12, 3072, False, 50368, True, 512, 124_131_840),
    ("MPT-760m", 24, 1536, 12, 12, 6144, False, 50368, True, 65536, 857_988_096),
    ("MPT-7b", 32, 4096, 32, 32, 16384, False, 50368, True, 2048, 6_658_859_008),
    ("MPT-30b", 48, 7168, 56, 56, 28672, False, 50368, True, 8192, 30_019_254_272),
    ("Llama-3.1-8B", 32, 4096, 32, 8, 14336, True, 128256, False, 0, 8_030_261_248),
    ("Llama-3-70B", 80, 8192, 64, 8, 28672, True, 128256, False, 0, 70_553_706_496),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
@pytest.mark.by_default
def test_plain_numbers_give_the_published_number_of_parameters(row: tuple[Any, ...]) -> None:
    _, layers, hidden, heads, kv_heads, ffn, gated, vocabulary, tied, positions, numel = row
    options = {"kv_heads": kv_heads, "ffn": ffn, "gated": gated, "tied": tied, "positions": positions}
    assert of_numbers(layers, hidden, heads, vocabulary, **options).numel == numel


@pytest.mark.parametrize(
    "numbers",
    [
        Transformer(3, 16, 4, 40, 11, kv_heads=2, gated=True, norm="rms", activation="silu", rotary=True),
        Transformer(2, 16, 4, 40, 11, positions=5, norm_bias=True, qkv_bias=True, mlp_bias=True, tied=True),
        Transformer(2, 16, 4, 40, 11, norms=1, head_norms=True, head_dim=6, norm="plain"),
        Transformer(2, 16, 4, 40, 11, decoder_layers=12, norm="rms", tied=True, attention="eager"),
    ],
    ids=["llama", "gpt", "parallel", "encoder and decoder"],
)
@pytest.mark.by_default
def test_numbers_give_the_parameters_of_the_reference_module(numbers: Transformer) -> None:
    with torch.device("meta"):
        module = ReferenceModel(numbers)
    described, model = from_numbers(numbers, "reference"), model_of(module, "reference")
    assert (described.parameters, described.units) == (model.parameters, model.units)


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"heads": 3}, {"kv_heads": 3}])
def test_numbers_that_make_no_transformer_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        of_numbers(**{"layers": 1, "hidden": 16, "heads": 4, "vocabulary": 3, **wrong})


# -- modules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.by_default
def test_specs_of_a_module_on_meta_are_those_that_an_optimizer_makes(preset: str) -> None:
    with torch.device("meta"):
        described = GPT(PRESETS[preset], 8)
    module = GPT(PRESETS[preset], 8)
    for each in (described, module):
        each.norm.requires_grad_(preset != "small")
    units = find_units(module)
    groups = [{"params": list(module.parameters())}]
    _, made = specs(groups, module, units=units.numbers())
    model = model_of(described, preset)
    assert model.specs(with_units=True) == made
    assert build(model.specs(with_units=True), 3, 10_000) == build(made, 3, 10_000)
    assert model.units == units.names


def test_units_of_a_module_are_chosen_as_for_the_optimizer() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"a": nn.Linear(3, 4)}))
    assert model_of(module, "m").units == ("the root's rest", "0", "1.a")
    assert model_of(module, "m", lambda part: part is module[0]).units == ("the root's rest", "0")
