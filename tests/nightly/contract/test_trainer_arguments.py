"""Trainer's arguments for 16 bits and compilation train the plain loop's bits; what it cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ...contract.ecosystem import (
    DATASET,
    STAGES,
    WORLD_SIZE,
    assert_same_state,
    by_micro_batch,
    gpt2,
    note_inputs,
    plain_trainer,
    state_of,
    trainer_names,
    training_arguments,
)
from ...support.launched import launch
from ...support.loops import BLOCKS, code_of, seeded

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]  # such libraries are slow


def train_in_16_bits_and_compiled(started: dict[str, Any], folder: Path) -> list[Any]:
    """Return, for each stage and argument, the model's inputs and its state after training.

    The model is compiled as a whole, which at stage 3 makes another graph: it only has to train there.
    """
    results = []
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    for stage, changes in [*((stage, {"bf16": True}) for stage in STAGES), (2, compiled), (3, compiled)]:
        names = trainer_names(started, stage, training_arguments(folder / f"stage-{stage}", **changes))
        calls: list[dict[str, Tensor]] = []
        if changes is not compiled:
            note_inputs(names["model"], calls)
        exec(code_of("Trainer"), names)
        names["trainer"].zero.check_replicas()
        names["trainer"].zero.close()
        results.append((stage, by_micro_batch(calls), state_of(names["model"])))
    return results


def test_trainers_bf16_and_torch_compile_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def in_16_bits(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(**call).loss
        return loss.float() * WORLD_SIZE

    compiled: dict[nn.Module, Any] = {}

    def compiled_loss(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        if model not in compiled:
            compiled[model] = torch.compile(model, backend="aot_eager")
        loss: Tensor = compiled[model](**call).loss * WORLD_SIZE
        return loss

    *of_bf16, of_compiled, _ = launch(f"{__name__}:train_in_16_bits_and_compiled", tmp_path, limit=280)
    inputs = of_bf16[0][1]
    expected = state_of(plain_trainer(in_16_bits, inputs))
    for stage, calls, state in of_bf16:
        assert all(torch.equal(a, b) for a, b in zip(calls[-1].values(), inputs[-1].values(), strict=True))
        assert_same_state(state, expected, f"stage {stage}, bf16")
    assert_same_state(of_compiled[2], state_of(plain_trainer(compiled_loss, inputs)), "compiled")


def trainer_class(names: dict[str, Any]) -> Any:
    """Return the block's class, without the training behind it."""
    exec(BLOCKS["Trainer"].partition("\ntrainer = ")[0], names)
    return names["ZeroTrainer"]


@pytest.mark.parametrize("name", ["fp16", "fsdp", "deepspeed"])
def test_an_argument_that_the_trainer_of_the_guide_cannot_do_is_an_error(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = training_arguments(tmp_path)
    setattr(arguments, name, True)
    trainer = trainer_class(trainer_names({"torch": torch}, 3, arguments))
    with pytest.raises(ValueError, match=f"ZeroTrainer does not take {name}"):
        trainer(model=seeded(5, gpt2), args=arguments, train_dataset=DATASET)
