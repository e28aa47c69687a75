"""An argument of transformers' Trainer that `ZeroTrainer` cannot obey is an error with the reason and the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero.integrations.transformers import (
    REFUSALS,
    check_accelerator,
    check_arguments,
    check_choices,
    check_process,
    check_ranks,
    choices_of,
)

from ..support.errors import error_of
from ..support.refused import REFUSED


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_an_argument_that_cannot_be_obeyed_is_an_error(row: Any) -> None:
    said = error_of(check_arguments, SimpleNamespace(**{row.argument: row.value}))
    assert said.startswith(f"ValueError: ZeroTrainer does not take TrainingArguments({row.argument}={row.value!r}): ")
    assert row.words in said


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_other_values_of_it_are_taken(row: Any) -> None:
    for value in (None, row.taken):
        check_arguments(SimpleNamespace(**{row.argument: value}))


def test_every_refusal_is_one_of_these() -> None:
    for refusal in REFUSALS:
        values = [row.value for row in REFUSED if row.argument == refusal.argument]
        assert any(refusal.refuses(value) for value in values), refusal


def test_a_process_that_would_not_be_one_rank_with_one_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_process(SimpleNamespace(n_gpu=1, world_size=2))
    said = error_of(check_process, SimpleNamespace(n_gpu=4, world_size=1))
    assert "4 GPUs in one process" in said
    assert said.endswith("torchrun --nproc-per-node 4 SCRIPT")
    said = error_of(check_process, SimpleNamespace(n_gpu=0, world_size=1))
    assert "2 processes were started, but TrainingArguments has found 1: each would train alone" in said
    assert said.endswith("TrainingArguments(use_cpu=True)")


def test_what_the_environment_of_accelerate_chooses_is_an_error_too() -> None:
    check_accelerator(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=None), mixed_precision="bf16"))
    for plugin in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
        chosen = SimpleNamespace(state=SimpleNamespace(**{plugin: object()}), mixed_precision="no")
        assert f"ZeroTrainer does not take Accelerator's {plugin}" in error_of(check_accelerator, chosen)
    said = error_of(check_accelerator, SimpleNamespace(state=SimpleNamespace(), mixed_precision="fp8"))
    assert "ZeroTrainer does not take ACCELERATE_MIXED_PRECISION=fp8" in said


def test_ranks_with_other_arguments_or_datasets_of_other_lengths_are_an_error() -> None:
    def choices(length: int = 7, dispatch: bool | None = None, **changes: Any) -> Any:
        config = SimpleNamespace(dispatch_batches=dispatch)
        args = SimpleNamespace(**{"seed": 1, "data_seed": None, "accelerator_config": config, **changes})
        return choices_of(args, range(length), "train_dataset")

    check_choices([choices(), choices()])
    check_choices([choices(), choices(seed=2, data_seed=1)])  # other draws of dropout, the same samples
    check_choices([choices(7, dispatch=True), choices(8, dispatch=True)])  # rank 0 alone reads
    assert error_of(check_choices, [choices(), choices(), choices(seed=2)]) == (
        "ValueError: ZeroTrainer: TrainingArguments(data_seed=...), by default its seed, is 1 on rank 0 and 2 on rank "
        "2: give all ranks the same arguments and the same whole dataset, of which Trainer deals each rank its part"
    )
    said = error_of(check_choices, [choices(), choices(max_steps=5)])
    assert "TrainingArguments(max_steps=...) is None on rank 0 and 5 on rank 1" in said
    assert "the length of the train_dataset is 7 on rank 0 and 8 on rank 1" in error_of(
        check_choices, [choices(), choices(8)]
    )
    check_ranks(SimpleNamespace(world_size=1), None, "train_dataset")
