"""Tools that look at storages write and load every tensor of a model inside `gathered()`, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import ZeroOptimizer

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.loops import even, mean_loss, network, seeded
from .ecosystem import State, state_of

pytestmark = pytest.mark.timeout(500)
STAGES = (2, 3)


class Tied(nn.Module):
    """A network with a tie and a frozen 16-bit matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first = network(), nn.Parameter(torch.arange(6.0).view(2, 3))
        self.frozen = nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16), requires_grad=False)
        self.tied = self.first

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs) + self.first.sum()


def saved_and_loaded(started: dict[str, Any], folder: Path) -> list[tuple[State, State]]:
    """Train and save with each tool, and load into another model. Return both states."""
    import huggingface_hub
    from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from safetensors.torch import load_model, save_model

    states = []
    for stage in STAGES:
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tool_writes_every_tensor_and_what_it_wrote_is_loaded(ranks: int, tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file, load_model

    states = launch(f"{__name__}:saved_and_loaded", tmp_path, ranks=ranks, limit=240)
    for stage, (trained, loaded) in zip(STAGES, states, strict=True):
        place, models = tmp_path / str(stage), [seeded(7, Tied) for _ in range(3)]
        load_model(models[0], str(place / "safetensors"))
        huggingface_hub.load_torch_model(models[1], place / "hub")
        written = load_file(place / "accelerate" / "model.safetensors")
        assert models[2].load_state_dict(written, strict=False).missing_keys in (["tied"], ["first"])
        for state in (loaded, *(dict(model.state_dict()) for model in models)):
            assert_same_dict(state, trained)
        assert (place / "one.pt").stat().st_size < 2000
