"""The blocks of `zero/checkpoint/DEEPSPEED.md` read what DeepSpeed writes, and training goes on from there.

What DeepSpeed itself writes is skipped if it is not installed (the extra `peers`); the others read a file that torch
wrote in its form.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from zero import ZeroOptimizer

from ...checkpoint.saved import Payload
from ...support.launched import launch
from ...support.loops import blocks_of, seeded
from ...support.plain import assert_same_bits, assert_same_states

PAGE = Path(zero.__file__).parent / "checkpoint" / "DEEPSPEED.md"
BLOCKS = blocks_of(PAGE.read_text())
WORLD_SIZE, STEPS = 2, 3
CASES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2-round-robin": {"stage": 2, "round_robin_gradients": True},  # another order of the parameters
    "3": {"stage": 3},
    "3-parts": {"stage": 3, "sub_group_size": 16},  # a param group has several flat tensors
    "2-bf16": {"stage": 2},
    "3-bf16": {"stage": 3},
}

pytestmark = pytest.mark.timeout(300)


def block(heading: str) -> Any:
    return compile(BLOCKS[heading], f"DEEPSPEED.md, {heading!r}", "exec")


class TiedAndFrozen(nn.Module):
    """A model with a tied, a frozen and an unused parameter, and a buffer; no number of elements is even."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]), requires_grad=False)
        self.register_buffer("shift", torch.tensor([0.25, 0.0, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) * self.scale)
        found: Tensor = self.second(hidden) * self.frozen + self.tied(hidden / 2) + self.shift
        return found


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [pair for pair in named if pair[1].dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [pair for pair in named if pair[1].dim() == 1], "lr": 2e-2},
    ]


def batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(count)]


def train_with_deepspeed(names: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and save in each case. Return what DeepSpeed reports: weights and states by the names of parameters."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.utils import (  # type: ignore[import-not-found]
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    reported: dict[str, Any] = {}
    for case, options in CASES.items():
        model = seeded(5, TiedAndFrozen)
        unnamed = [{**group, "params": [p for _, p in group["params"]]} for group in groups_of(model)]
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": options,
            "bf16": {"enabled": case.endswith("bf16")},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(unnamed, lr=1e-2), config=config)
        for inputs, targets in batches(1, STEPS * WORLD_SIZE)[names["rank"] :: WORLD_SIZE]:
            engine.backward(nn.functional.mse_loss(engine(inputs.to(model.scale.dtype)).float(), targets))
            engine.step()
        engine.save_checkpoint(str(folder / case))
        if options["stage"] < 3:  # states of all param groups but the first are missing in its own reports
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        reported[case] = {
            "weights": {name: safe_get_full_fp32_param(p) for name, p in trained},
            **{
                state: {name: safe_get_full_optimizer_state(p, state) for name, p in trained}
                for state in ("exp_avg", "exp_avg_sq")
            },
        }
        engine.destroy()
    reported["2-round-robin"] = reported["2"]  # its own reports are mixed up; two ranks' sums have one order
    return reported


def reader() -> Any:
    scope: dict[str, Any] = {}
    exec(block("Reading it"), scope)
    return scope["read_deepspeed"]


def test_what_deepspeed_writes_is_read_with_the_bits_that_it_reports(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    reported = launch("tests.nightly.checkpoint.test_deepspeed:train_with_deepspeed", tmp_path, limit=250)
    for case, expected in reported.items():
        found = reader()(tmp_path / case)
        names = [name for group in found["optimizer"]["param_groups"] for name in group["param_names"]]
        assert sorted(names) == sorted(expected["weights"])
        for number, name in enumerate(names):
            assert_same_bits(found["model"][name], expected["weights"][name], f"{case}, {name}")
            state = found["optimizer"]["state"][number]
            assert state["step"] == STEPS
            for key in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(state[key], expected[key][name], f"{case}, {key} of {name}")


def forged(folder: Path) -> Path:
    """Write a folder in the form of stage 1, on one rank, and return its tag's."""
    inside = folder / "tag"
    inside.mkdir()
    (folder / "latest").write_text("tag\n")
    (options,) = torch.optim.AdamW([torch.zeros(1)], lr=0.1).state_dict()["param_groups"]
    state = {"exp_avg": torch.ones(8), "exp_avg_sq": torch.arange(8.0), "step": torch.tensor(4.0)}
    rank = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.arange(6.0)],
        "base_optimizer_state": {"state": {0: state}, "param_groups": [options]},
    }
    shapes, model = [{"weight": torch.Size([2, 3])}], {"weight": torch.zeros(2, 3)}
    facts = {"module": model, "param_shapes": shapes, "shared_params": {}, "global_steps": 7}
    torch.save(facts, inside / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": rank}, inside / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return inside


def test_a_folder_is_read_without_deepspeed_and_training_goes_on_as_in_the_plain_loop(tmp_path: Path) -> None:
    forged(tmp_path)
    model, plain = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    scope: dict[str, Any] = {"path": str(tmp_path), "stage": 2, "model": model, "ZeroOptimizer": ZeroOptimizer}
    exec(block("Reading it"), scope)
    exec(block("Training on"), scope)
    optimizer = scope["optimizer"]
    plain.weight.data.copy_(torch.arange(6.0).view(2, 3))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    state = {"exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0)}
    reference.load_state_dict({**reference.state_dict(), "state": {0: state}})
    for each, its in ((model, optimizer), (plain, reference)):
        each(torch.ones(2, 3)).square().sum().backward()
        its.step()
    assert_same_bits(model.weight, plain.weight)
    assert_same_states(optimizer.state_dict(), reference.state_dict())


def test_what_cannot_be_read_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    inside = forged(tmp_path)
    of_model, of_rank = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for name in (of_model, of_rank):
        kept = torch.load(inside / name, weights_only=True)
        torch.save({**kept, "client": Payload(tmp_path / "ran")}, inside / name)
        with pytest.raises(ValueError, match=f"{name} is damaged, or holds objects that only unpickling makes, which"):
            reader()(tmp_path)
        assert not (tmp_path / "ran").exists()
        torch.load(inside / name, weights_only=False)
        (tmp_path / "ran").rmdir()
        torch.save(kept, inside / name)
    others = ("mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt", "layer_00-model_states.pt")
    for name in (*others, "expp_rank_0_mp_rank_00_optim_states.pt"):
        (inside / name).write_bytes(b"")
        with pytest.raises(ValueError, match=f"{name}: tensor, pipeline and expert parallelism are not read here"):
            reader()(tmp_path)
        (inside / name).unlink()
    found = torch.load(inside / of_rank, weights_only=True)
    for key, value, words in (
        ("base_optimizer_state", [{}], "was saved with elastic_checkpoint, which leaves the param groups out"),
        ("partition_count", [2], "does not have the states of every rank of ZeRO stage 1, 2 or 3"),
    ):
        found["optimizer_state_dict"][key] = value
        torch.save(found, inside / of_rank)
        with pytest.raises(ValueError, match=words):
            reader()(tmp_path)
    assert set(BLOCKS) == {"Reading it", "Training on"}, "every block of the page is run here"
