"""Training comes from a folder of transformers and leaves one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero import open_checkpoint

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.loops import PlainLoop, code_of, seeded
from .ecosystem import STAGES, State, gpt2, language_loss, llama, state_of, tokens, train_on_tokens, variables

pytestmark = pytest.mark.timeout(300)
FAMILIES = {"gpt2": gpt2, "llama": llama}  # the first has tied embeddings, the second buffers that no file has


def come_and_leave(started: dict[str, Any], folder: Path) -> list[tuple[str, list[tuple[str, State]]]]:
    """Train what `save_pretrained` wrote, with memory and built without, and leave for a folder of transformers.

    Return for each stage the folder of the checkpoint, and models: gpt2, as it came back from there; both families.
    """
    results = []
    for stage in STAGES:
        names = variables(started, stage, path=str(folder / "gpt2"), checkpoint=str(folder / f"stage-{stage}"))
        exec(code_of("From a transformers folder"), names)
        train_on_tokens(names)
        exec(code_of("To a transformers folder"), names)
        names["optimizer"].close()
        assert_same_dict(state_of(names["whole"]), state_of(names["model"]))
        names["path"] = f"{names['checkpoint']}/model"
        exec(code_of("From a transformers folder"), names)
        assert names["model"].training
        names["optimizer"].close()
        states = [("gpt2", state_of(names["model"]))]
        for family in FAMILIES:
            built = variables(started, stage, path=folder / family)
            exec(code_of("A transformers model without memory"), built)
            train_on_tokens(built)
            built["optimizer"].close()
            states.append((family, state_of(built["model"])))
        results.append((names["checkpoint"], states))
    return results


def test_training_comes_from_a_transformers_folder_also_without_memory_and_leaves_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for family, build in FAMILIES.items():
        built: Any = seeded(5, build)
        built.save_pretrained(tmp_path / family)
    models = launch(f"{__name__}:come_and_leave", tmp_path, limit=280)
    expected, contents = {}, set()
    for family in FAMILIES:
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family).train()
        PlainLoop(language_loss, max_norm=float("inf")).run(plain, tokens(4))
        expected[family] = state_of(plain)
    for path, states in models:
        for family, state in states:
            assert_same_dict(state, expected[family])
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        contents.add(checkpoint.content)
        _, loading = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/model", output_loading_info=True)
        assert not any(loading.values()), loading
        for name in ("config.json", "generation_config.json"):
            assert (checkpoint.path / "model" / name).read_bytes() == (tmp_path / "gpt2" / name).read_bytes()
    assert len(contents) == 1
