"""Training comes from a folder of transformers and leaves one; tools that look at storages save gathered models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer, open_checkpoint

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.limits import BOUND
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


def test_training_comes_from_a_transformers_folder_also_without_memory_and_leaves_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected, contents = {}, set()
    for family, build in FAMILIES.items():
        built: Any = seeded(5, build)
        built.save_pretrained(tmp_path / family)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family).train()
        PlainLoop(language_loss, max_norm=float("inf")).run(plain, tokens(4))
        expected[family] = state_of(plain)
    for path, states in launch(f"{__name__}:come_and_leave", tmp_path, limit=280):
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


@pytest.mark.parametrize("stage", [2, 3])
def test_every_tool_writes_every_tensor_of_a_gathered_model_and_what_it_wrote_is_loaded(
    stage: int, tmp_path: Path
) -> None:
    """By tools that look at storages."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    from safetensors.torch import load_file, load_model, save_model

    ranks = [(seeded(5, Tied), seeded(6, Tied)) for _ in range(2)]

    def program(transport: Transport) -> tuple[State, State]:
        model, other = ranks[transport.rank]
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, lr=1e-2)
        mean_loss(model, even(1)[0]).backward()
        optimizer.step()
        with optimizer.gathered():
            trained = state_of(model)
            if transport.rank == 0:
                accelerator.save_model(model, tmp_path / "accelerate")
                (tmp_path / "hub").mkdir()
                huggingface_hub.save_torch_model(model, tmp_path / "hub")
                save_model(model, str(tmp_path / "safetensors"))
                torch.save(model.first, tmp_path / "one.pt")
        optimizer.close()
        loading = ZeroOptimizer(other, torch.optim.AdamW, stage=5 - stage, process_group=transport, lr=1e-2)
        with loading.gathered(write=True):
            load_model(other, str(tmp_path / "safetensors"))
        loading.close()
        return trained, state_of(other)

    results, models = on_threads(2, program, timeout=BOUND), [seeded(7, Tied) for _ in range(3)]
    load_model(models[0], str(tmp_path / "safetensors"))
    huggingface_hub.load_torch_model(models[1], tmp_path / "hub")
    written = load_file(tmp_path / "accelerate" / "model.safetensors")
    assert models[2].load_state_dict(written, strict=False).missing_keys in (["tied"], ["first"])
    for trained, loaded in results:
        for state in (loaded, *(dict(model.state_dict()) for model in models)):
            assert_same_dict(state, trained)
    assert (tmp_path / "one.pt").stat().st_size < 2000
