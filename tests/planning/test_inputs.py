"""A config, a list of parameters, a setting or a file of hardware is read exactly, or named in one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectives import solo
from zero import MixedPrecision, ZeroOptimizer
from zero.planning.hardware import PRESETS, presets, read_hardware
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model
from zero.planning.models.shapes import FAMILIES, from_config, model_of, of_config, of_parameter_list
from zero.planning.setting import PlanSetting
from zero.precision import checked

from ..support.errors import assert_in_order, error_of
from .configs import GPT2, LLAMA_3_8B, PUBLISHED

TEXT = """# a small model

embedding.weight 7x4 float32
h.0.w [4, 4] torch.bfloat16  # a matrix
h.1.b (4,) bf16
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
    assert model == from_config(LLAMA_3_8B, tmp_path.name)
    assert of_config(tmp_path / "config.json") == replace(model, name="config"), "nothing names it"
    for file, more, name in (
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ("llama8b.json", {"architectures": ["LlamaForCausalLM"]}, "llama8b"),
        ("llama8b.json", {"_name_or_path": "meta-llama/Llama-3.1-8B"}, "meta-llama/Llama-3.1-8B"),
    ):
        (tmp_path / file).write_text(json.dumps(LLAMA_3_8B | more))
        assert of_config(tmp_path / file).name == name
    assert model.transformer is not None
    assert (model.transformer.hidden, model.transformer.vocabulary) == (4096, 128256)
    assert model.units[1] == "model.layers.0"
    assert from_config(GPT2, "gpt2").parameters[0].names == ("transformer.wte.weight", "lm_head.weight"), "tied"


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 1]} for name, (dtype, shape) in tensors.items()
    }
    header = json.dumps({"__metadata__": {}, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_lines_of_text_a_safetensors_file_or_an_index_of_some_give_units_by_number(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text(TEXT)
    found = [(p.names[0], p.shape, p.unit) for p in of_parameter_list(tmp_path / "names.txt").parameters]
    assert found == [("embedding.weight", (7, 4), 0), ("h.0.w", (4, 4), 1), ("h.1.b", (4,), 2), ("scale", (), 0)]
    blocks = {f"model.layers.{n}.{part}.weight": ("F32", [2, 3]) for n in range(12) for part in ("down", "up")}
    state = {**blocks, "embed.weight": ("BF16", [10**6, 10**6]), "position_ids": ("I64", [4]), "scale": ("F32", [])}
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(state))}
    for file in set(files.values()):
        write(tmp_path / file, {name: state[name] for name in state if files[name] == file})
    write(tmp_path / "whole.safetensors", state)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    model = of_parameter_list(tmp_path / "whole.safetensors")
    assert of_parameter_list(index).parameters == model.parameters
    assert model.units == ("the root's rest", *(f"model.layers.{n}" for n in range(12)))
    assert model.unit_numels() == [10**12 + 1, *[12] * 12]
    assert {p.names[0] for p in model.parameters} == state.keys() - {"position_ids"}


CPU = json.loads(PRESETS.read_text())["gpus"]["cpu"]
MEASURED = {"format": 1, "date": "2026-11-24", "machine": "two cores"}


def test_a_text_names_a_cluster() -> None:
    cluster = presets().cluster("h100:8x16")
    assert (cluster.gpu.name, cluster.per_host, cluster.hosts, cluster.ranks) == ("h100", 8, 16, 128)
    assert presets().cluster("h100:8x16", nic=400, fabric="good").nic == 50e9
    assert presets().cluster("a100-80").ranks == presets().cluster("a100-80:8").ranks == 8
    for text, in_domain in (("h100:1x2", 1), ("h100:8x16", 8), ("gb200:4x16", 64), ("gb200:4x36", 72)):
        found = presets().cluster(text)
        assert (found.nic / found.per_host, found.per_domain) == (50e9, in_domain), text


def test_a_measured_file_changes_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    cpu = {**CPU, "efficiency": {"matmul": {"value": 0.5, "unit": "1", "source": "measured"}}}
    base = {"value": 10, "unit": "us", "source": "measured"}
    found = hardware(gpus={"here": cpu}, network={"base": base}, host={"launch": base})(tmp_path)
    assert found.measured == "two cores, 2026-11-24"
    assert found.gpus["here"].efficiency == {"matmul": 0.5}
    assert found.network.base == pytest.approx(10e-6)
    assert found.network.hop_inside == presets().network.hop_inside
    assert found.calls == replace(presets().calls, launch=pytest.approx(10e-6))
    assert found.gpus.keys() == presets().gpus.keys() | {"here"}


def read(name: str, content: bytes | dict[str, Any]) -> Callable[[Path], Any]:
    """Return a function that writes a file to a folder and reads it."""

    def written_and_read(folder: Path) -> Any:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(text)
        readers = {"config.json": of_config, "hardware.json": read_hardware}
        return readers.get(name, of_parameter_list)(folder / name)

    return written_and_read


def config(**changes: Any) -> Callable[[Path], Any]:
    """Return a function that reads Llama's config with changes; a key of None is left out."""
    return read("config.json", {key: value for key, value in (LLAMA_3_8B | changes).items() if value is not None})


def hardware(**content: Any) -> Callable[[Path], Any]:
    return read("hardware.json", MEASURED | content)


def fabric(**given: Any) -> Callable[[Path], Any]:
    return hardware(fabrics={"typical": {"value": 30, "unit": "us", **given}})


WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (config(model_type="lama"), "'lama' is unknown (did you mean 'llama'?); known are … gpt_neox … --parameters"),
    (config(num_local_experts=8), "num_local_experts is 8, and experts are not planned … --parameters"),
    (config(hidden_size=None), "none of the keys hidden_size, n_embd, d_model"),
    (config(num_attention_heads=33), "33 heads do not divide hidden 4096"),
    (config(num_hidden_layers="32"), "num_hidden_layers is '32', and must be a positive integer"),
    (read("config.json", b""), "config.json cannot be read"),
    (read("a.txt", b"h.0.weight\n"), "line 1: 'h.0.weight' is not 'name shape dtype'"),
    (read("a.safetensors", b"\xff" * 8), "its header would have"),
    (read("a.safetensors", b"\x02" + b"\0" * 7 + b"xx"), "holds no JSON"),
    (read("a.json", b'{"weight_map": {"a": "gone.safetensors"}}'), "cannot be read"),
    (lambda folder: of_parameter_list(folder / "none.txt"), "cannot be read"),
    (lambda _: PlanSetting(world_size=0), "world_size must be a whole number, at least 1, not 0"),
    (lambda _: PlanSetting(bucket_cap_mb="auto"), "depends on the model"),
    (lambda _: PlanSetting(stage=3, world_size=8, reshard_after_forward=3), "a number that divides the 8 ranks"),
    (lambda _: PlanSetting(partition="block"), 'partition="block" is planned for optimizers with states for blocks'),
    (lambda _: PlanSetting(optimizer="adamw8bit"), "not None for 'adamw8bit'"),
    (lambda _: PlanSetting(optimizer="lion"), "optimizer must be one of 'adamw', … not 'lion'"),
    (lambda _: PlanSetting(world_size=8, ranks_per_host=3), "ranks_per_host must divide the number of ranks, 8, not 3"),
    (fabric(), 'fabrics.typical must be an object of "value", "unit" and "source"'),
    (fabric(source=" "), "fabrics.typical: a value needs a source"),
    (fabric(unit="GB", source="a page"), "the unit must be one of us, ms, not 'GB'"),
    (lambda _: presets().cluster("h10:8x2"), "no GPU is called 'h10': did you mean 'h100'?"),
    (lambda _: presets().cluster("h100:0x2"), "give GPU:GPUS_PER_HOST, or GPU:GPUS_PER_HOSTxHOSTS as in h100:8x16"),
    (
        lambda _: presets().cluster("rtx4090:8x2"),
        "2 hosts of 'rtx4090', and no network is usual for it: give the Gb/s of a host",
    ),
    (hardware(format=2), "hardware file … hardware.json: … format is 2, and this version reads 1"),
    (hardware(network={"bas": 1}), "hardware.json: … unknown key 'bas': did you mean 'base'"),
    (hardware(host={"lunch": 1}), "host has an unknown key 'lunch': did you mean 'launch'"),
    (
        lambda _: presets().gpus["v100-32"].peak("bfloat16"),
        "GPU 'v100-32' has no products of bfloat16: choose one of float16, float32",
    ),
    (
        lambda _: MemoryPlan(Model("none", ())).of_rank(PlanSetting(stage=2, world_size=2), 2),
        "rank must be from 0 to 1, not 2",
    ),
]


@pytest.mark.parametrize(("read", "words"), WRONG)
def test_what_cannot_be_planned_is_named(read: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    assert_in_order(f"ValueError: … {words}", error_of(read, tmp_path))


class Shared(nn.Module):
    """A module with two names, one of them inside another module, and a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second = nn.Sequential(self.first, nn.Linear(3, 3))
        self.second[1].weight = self.tied.weight
        self.third = self.first


@pytest.mark.parametrize("in_bf16", ["first", "second", "second.0", "third", "tied", "tied second.1"])
def test_a_module_with_two_names_has_one_precision_in_a_plan_and_in_training(in_bf16: str) -> None:
    model, bf16 = Shared(), MixedPrecision(torch.bfloat16)
    patterns = {"*": MixedPrecision(torch.float32), **dict.fromkeys(in_bf16.split(), bf16)}
    shapes, of_plan, planned = model_of(model, "shared"), list[Any](), "nothing"
    try:
        of_plan = [dtypes.param_dtype for dtypes in shapes.dtypes(checked(patterns))]
    except ValueError as error:
        planned = f"ValueError: {error}".replace("no parameter:", "no module:")
    assert error_of(ZeroOptimizer, model, torch.optim.SGD, mixed_precision=patterns, process_group=solo()) == planned
    if planned == "nothing":
        assert [parameter.dtype for parameter in model.parameters()] == of_plan
