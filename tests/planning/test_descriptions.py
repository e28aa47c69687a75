"""A config, a module or a list of parameters gives the model's exact parameters, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from zero.planning.models.families import FAMILIES
from zero.planning.models.parameter_lists import of_parameter_list
from zero.planning.models.shapes import from_config, model_of, of_config

from .configs import GPT2, LLAMA_3_8B, PUBLISHED

WRONG_CONFIGS = (
    ({"model_type": "lama"}, r"'lama' is unknown \(did you mean 'llama'\?\); known are .*gpt_neox.*--parameters"),
    ({"model_type": None}, "model_type None is unknown; known are"),
    ({"num_local_experts": 8}, "num_local_experts is 8, and experts are not planned.*--parameters"),
    ({"hidden_size": None}, "none of the keys hidden_size, n_embd, d_model"),
    ({"num_attention_heads": 33}, "33 heads do not divide hidden 4096"),
    ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', and must be a positive integer"),
    ({"num_key_value_heads": 5}, "kv_heads 5 do not divide 32 heads"),
)
WRONG_FILES = (
    ("config.json", b"", r"config\.json cannot be read"),
    ("config.json", b"[1]", r"config\.json is no config"),
    ("config.json", None, r"config\.json cannot be read"),
    ("a.txt", b"h.0.weight\n", "line 1: 'h.0.weight' is not 'name shape dtype'"),
    ("a.txt", b"a 3 float32\nb 3y4 float32", "line 2"),
    ("a.txt", b"a 0x4 float32", "'a' has no elements"),
    ("a.txt", b"a 4 int64", "no tensor of a float dtype"),
    ("a.txt", b"", "no tensor of a float dtype"),
    ("a.txt", None, "cannot be read"),
    ("a.safetensors", b"\xff" * 8, "its header would have"),
    ("a.safetensors", b"\x02" + b"\0" * 7 + b"xx", "holds no JSON"),
    ("a.safetensors", b"\x02" + b"\0" * 7 + b"[]", "is no list of parameters"),
    ("a.json", b"{}", "is no list of parameters"),
    ("a.json", b'{"weight_map": {"a": "gone.safetensors"}}', "cannot be read"),
)
TEXT = """# a small model

embedding.weight 7x4 float32
h.0.norm (4,) torch.bfloat16
h.0.w [4, 4] float32  # a matrix
h.1.w 4,4 bf16
scale () float32
steps () int64
"""


def test_published_configs_have_their_published_number_of_parameters(tmp_path: Path) -> None:
    for name, (config, numel) in PUBLISHED.items():
        model = from_config(config, name)
        assert model.numel == numel == sum(model.unit_numels()), name
        assert len(model.units) == 1 + len({p.unit for p in model.parameters if p.unit}), name
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == FAMILIES.keys()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    model = of_config(tmp_path)
    assert model == of_config(tmp_path / "config.json") == from_config(LLAMA_3_8B, tmp_path.name)
    assert (model.hidden, model.vocabulary, model.units[1]) == (4096, 128256, "model.layers.0")


def test_ties_are_further_names_of_one_parameter() -> None:
    assert from_config(GPT2, "gpt2").parameters[0].names == ("transformer.wte.weight", "lm_head.weight")
    model = from_config(PUBLISHED["flan-t5-xl"][0], "flan-t5-xl")
    assert model.parameters[-1].names == ("lm_head.weight",)
    shared = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    assert model.parameters[0].names == shared


@pytest.mark.parametrize(("change", "message"), WRONG_CONFIGS)
def test_a_config_that_cannot_be_planned_is_named(change: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**LLAMA_3_8B, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        from_config(config, "changed", "config.json")


@pytest.mark.parametrize(("name", "content", "message"), WRONG_FILES)
def test_a_file_without_a_model_is_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    read = of_config if name == "config.json" else of_parameter_list
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_lines_of_text_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text(TEXT)
    model = of_parameter_list(tmp_path / "names.txt")
    assert [(p.names[0], p.shape, p.unit) for p in model.parameters] == [
        ("embedding.weight", (7, 4), 0),
        ("h.0.norm", (4,), 1),
        ("h.0.w", (4, 4), 1),
        ("h.1.w", (4, 4), 2),
        ("scale", (), 0),
    ]


def test_a_safetensors_file_or_an_index_of_some_gives_units_by_number(tmp_path: Path) -> None:
    blocks = {f"model.layers.{n}.{part}.weight": torch.ones(2, 3) for n in range(12) for part in ("down", "up")}
    root = {"embed.weight": torch.ones(5, 3, dtype=torch.bfloat16), "scale": torch.tensor(1.0)}
    state = {**blocks, **root, "position_ids": torch.arange(4)}
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(state))}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, tmp_path / file)
    save_file(state, tmp_path / "whole.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    model = of_parameter_list(tmp_path / "whole.safetensors")
    assert of_parameter_list(index).parameters == model.parameters
    assert model.units == ("the root's rest", *(f"model.layers.{n}" for n in range(12)))
    assert model.unit_numels() == [5 * 3 + 1, *[12] * 12]
    assert {p.names[0] for p in model.parameters} == {*blocks, *root}


def test_units_of_a_module_are_chosen_as_for_the_optimizer() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"a": nn.Linear(3, 4)}))
    assert model_of(module, "m").units == ("the root's rest", "0", "1.a")
    assert model_of(module, "m", lambda part: part is module[0]).units == ("the root's rest", "0")
