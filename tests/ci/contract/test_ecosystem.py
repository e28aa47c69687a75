"""Training comes from a folder of transformers and leaves one; tools that look at storages save gathered models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import ZeroOptimizer, open_checkpoint

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.loops import PlainLoop, code_of, even, mean_loss, network, seeded
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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first = network(), nn.Parameter(torch.arange(6.0).view(2, 3))
        self.frozen = nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16), requires_grad=False)
        self.tied = self.first

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs) + self.first.sum()


def saved_and_loaded(started: dict[str, Any], folder: Path) -> list[tuple[State, State]]:
    """Train and save with each tool that looks at storages, and load into another model. Return both states."""
    import huggingface_hub
    from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from safetensors.torch import load_model, save_model

    states = []
    for stage in (2, 3):
        model, other, place = seeded(5, Tied), seeded(6, Tied), folder / str(stage)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-2)
        mean_loss(model, even(1)[0]).backward()
        optimizer.step()
        with optimizer.gathered():
            trained = state_of(model)
            Accelerator(cpu=True).save_model(model, place / "accelerate")
            if started["rank"] == 0:
                (place / "hub").mkdir()
                huggingface_hub.save_torch_model(model, place / "hub")
                save_model(model, str(place / "safetensors"))
                torch.save(model.first, place / "one.pt")
        started["dist"].barrier()
        loading = ZeroOptimizer(other, torch.optim.AdamW, stage=5 - stage, lr=1e-2)
        with loading.gathered(write=True):
            load_model(other, str(place / "safetensors"))
        loading.close()
        states.append((trained, state_of(other)))
    return states


def on_two_ranks(started: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    return come_and_leave(started, folder), saved_and_loaded(started, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Let two ranks come from folders of transformers. Return the folder, and what the ranks return."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("ranks")
    for family, build in FAMILIES.items():
        built: Any = seeded(5, build)
        built.save_pretrained(folder / family)
    return folder, *launch(f"{__name__}:on_two_ranks", folder, limit=280)


def test_training_comes_from_a_transformers_folder_also_without_memory_and_leaves_one(results: Any) -> None:
    transformers = pytest.importorskip("transformers")
    folder, models, _ = results
    expected, contents = {}, set()
    for family in FAMILIES:
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / family).train()
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
            assert (checkpoint.path / "model" / name).read_bytes() == (folder / "gpt2" / name).read_bytes()
    assert len(contents) == 1


def test_every_tool_writes_every_tensor_of_a_gathered_model_and_what_it_wrote_is_loaded(results: Any) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file, load_model

    folder, _, states = results
    for stage, (trained, loaded) in zip((2, 3), states, strict=True):
        place, models = folder / str(stage), [seeded(7, Tied) for _ in range(3)]
        load_model(models[0], str(place / "safetensors"))
        huggingface_hub.load_torch_model(models[1], place / "hub")
        written = load_file(place / "accelerate" / "model.safetensors")
        assert models[2].load_state_dict(written, strict=False).missing_keys in (["tied"], ["first"])
        for state in (loaded, *(dict(model.state_dict()) for model in models)):
            assert_same_dict(state, trained)
        assert (place / "one.pt").stat().st_size < 2000
