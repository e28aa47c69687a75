"""Lists of parameters: what safetensors writes and what people write, read without a value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zero.planning.models.parameter_lists import of_parameter_list


def tensors(layers: int = 12) -> dict[str, torch.Tensor]:
    """Return the state of a model with blocks, an integer table and a scalar."""
    blocks = {f"model.layers.{n}.{part}.weight": torch.ones(2, 3) for n in range(layers) for part in ("down", "up")}
    root = {"model.embed.weight": torch.ones(5, 3, dtype=torch.bfloat16), "scale": torch.tensor(1.0)}
    return {**blocks, **root, "model.position_ids": torch.arange(4)}


def test_a_safetensors_file_gives_units_in_order_of_their_numbers(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    model = of_parameter_list(tmp_path / "model.safetensors")
    assert model.units == ("the root's rest", *(f"model.layers.{n}" for n in range(12)))
    assert model.unit_numels() == [5 * 3 + 1, *[12] * 12]
    assert model.transformer is None
    assert {p.names[0] for p in model.parameters} == tensors().keys() - {"model.position_ids"}


def test_an_index_gives_what_its_files_hold(tmp_path: Path) -> None:
    state = tensors()
    names = sorted(state)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, tmp_path / file)
    save_file(state, tmp_path / "whole.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    whole = of_parameter_list(tmp_path / "whole.safetensors")
    assert of_parameter_list(index).parameters == whole.parameters


def test_no_value_is_read(tmp_path: Path) -> None:
    """A file of its header alone is enough."""
    path = tmp_path / "big.safetensors"
    header = json.dumps({"0.weight": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert of_parameter_list(path).numel == 10**12


def test_lines_of_text_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text(
        "# a small model\n\nembedding.weight 7x4 float32\nh.0.norm (4,) torch.bfloat16\n"
        "h.0.w [4, 4] float32  # a matrix\nh.1.w 4,4 bf16\nscale () float32\nsteps () int64\n"
    )
    model = of_parameter_list(path)
    assert [(p.names[0], p.shape, p.unit) for p in model.parameters] == [
        ("embedding.weight", (7, 4), 0),
        ("h.0.norm", (4,), 1),
        ("h.0.w", (4, 4), 1),
        ("h.1.w", (4, 4), 2),
        ("scale", (), 0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h.0.weight\n", "line 1: 'h.0.weight' is not 'name shape dtype'"),
        ("a 3 float32\nb 3y4 float32", "line 2"),
        ("a 0x4 float32", "'a' has no elements"),
        ("a 4 int64", "no tensor of a float dtype"),
        ("", "no tensor of a float dtype"),
    ],
)
@pytest.mark.by_default
def test_a_line_of_another_form_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        of_parameter_list(tmp_path / "names.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"\xff" * 8, "its header would have"),
        ("a.safetensors", b"\x02" + b"\0" * 7 + b"xx", "holds no JSON"),
        ("a.safetensors", b"\x02" + b"\0" * 7 + b"[]", "is no list of parameters"),
        ("a.json", b"{}", "is no list of parameters"),
        ("a.json", b'{"weight_map": {"a": "gone.safetensors"}}', "cannot be read"),
        ("a.txt", None, "cannot be read"),
    ],
)
@pytest.mark.by_default
def test_a_file_that_is_no_list_is_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        of_parameter_list(tmp_path / name)
