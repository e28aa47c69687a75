"""`ZeroTrainer` trains, saves and goes on with the bits of Trainer, whose arguments it obeys or refuses."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from zero import MicroBatchSampler, MixedPrecision, ZeroOptimizer

from ...contract.recipes import assert_same_dict
from ...support.errors import error_of
from ...support.launched import launch
from ...support.loops import ROOT, code_of, seeded
from ...support.refused import REFUSED
from .ecosystem import (
    DATASET,
    WORLD_SIZE,
    by_micro_batch,
    gpt2,
    note_inputs,
    plain_trainer,
    state_of,
    training_arguments,
    variables,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from zero.examples import finetune_lora, hf_trainer  # noqa: E402 - needs transformers
from zero.integrations.transformers import ZeroConfig, ZeroTrainer  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process a rank alone, whatever the environment of the tests."""
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def trained(trainer: Any, resume: str | None = None) -> dict[str, Tensor]:
    """Train, and return the model's state."""
    trainer.train(resume_from_checkpoint=resume)
    if isinstance(trainer, ZeroTrainer):
        with trainer.zero_optimizer.gathered():
            return state_of(trainer.model)
    return state_of(trainer.model)


def plain(arguments: Any, seed: int = 5) -> Any:
    """Return transformers' own Trainer."""
    return transformers.Trainer(
        model=seeded(seed, gpt2), args=arguments, train_dataset=DATASET, eval_dataset=DATASET[:6]
    )


def sharded(arguments: Any, zero: ZeroConfig, seed: int = 5) -> Any:
    return ZeroTrainer(
        model=seeded(seed, gpt2), args=arguments, train_dataset=DATASET, eval_dataset=DATASET[:6], zero=zero
    )


# -- arguments ---------------------------------------------------------------------------------------------------------

FIELDS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
CHECKPOINTING = (
    "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
)  # before 5.23
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
FREE = ("adamw", "radam") if importlib.util.find_spec("schedulefree") else ()
TRAININGS: list[dict[str, Any]] = [  # arguments that change a training
    {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_epsilon": 1e-5, "lr_scheduler_type": "constant"},
    {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "cosine", "warmup_steps": 0.5},
    {
        "optim": "adagrad",
        "max_steps": 3,
        "dataloader_drop_last": True,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 2,
    },
    {"optim": "rmsprop", "gradient_accumulation_steps": 3, "average_tokens_across_devices": False},
    {"optim": "adafactor", "train_sampling_strategy": "sequential"},
    {"optim": "adamw_torch_8bit", "weight_decay": 0.0, "data_seed": 7},
    {"label_smoothing_factor": 0.1, CHECKPOINTING: True, "full_determinism": True},
    {"neftune_noise_alpha": 5.0, "bf16": True, "train_sampling_strategy": "batch_rebalance"},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, **EVALUATED},
    {"load_best_model_at_end": True, "save_strategy": "best", "learning_rate": 1.0, "save_total_limit": 1, **EVALUATED},
    {"debug": "underflow_overflow", "accelerator_config": {"dispatch_batches": True}, "eval_on_start": True},
    {"accelerator_config": {"split_batches": True, "use_seedable_sampler": False}, "use_cache": True},
    *({"optim": f"schedule_free_{name}", "lr_scheduler_type": "constant", **EVALUATED} for name in FREE),
]


@pytest.mark.filterwarnings("ignore:Adafactor is not element-wise")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_argument_that_is_obeyed_has_the_bits_of_trainer(stage: int, tmp_path: Path) -> None:
    """Unclipped: the norm of Trainer's own clip has other last bits than `zero.clip_grad_norm_`."""
    for number, changes in enumerate(TRAININGS):
        if number % 2 == stage % 2:
            found = []
            for side in (plain, lambda arguments: sharded(arguments, ZeroConfig(stage=stage))):
                output = tmp_path / f"{number}-{len(found)}"
                trainer = side(training_arguments(output, **{"max_grad_norm": 0.0, **changes}))
                torch.manual_seed(0)
                with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
                    state = trained(trainer)
                found.append((state, trainer.evaluate()["eval_loss"], trainer.predict(DATASET[:5]).predictions))
            (state, loss, logits), (other_state, other_loss, other_logits) = found
            assert_same_dict(other_state, state)
            assert other_loss == loss, changes
            numpy.testing.assert_array_equal(other_logits, logits)


OBEYED = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 tf32
    activation_checkpointing gradient_checkpointing torch_compile use_cache neftune_noise_alpha
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
    include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names length_column_name
    ddp_backend ddp_timeout skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
"""
"""The arguments that Trainer's own code obeys, whatever their value."""


def test_every_argument_of_the_release_is_obeyed_or_refused_and_no_default_is_refused(tmp_path: Path) -> None:
    assert not FIELDS - {*OBEYED.split(), *(row.argument for row in REFUSED)}  # an earlier release lacks some
    assert not set(OBEYED.split()) & {row.argument for row in REFUSED}
    trainer = sharded(transformers.TrainingArguments(str(tmp_path)), ZeroConfig(stage=3))
    assert trainer.zero_optimizer is None


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_a_trainer_with_an_argument_that_cannot_be_obeyed_is_an_error(row: Any, tmp_path: Path) -> None:
    arguments = training_arguments(tmp_path)
    setattr(arguments, row.argument, row.value)  # some are refused by transformers itself on a machine without a GPU
    with pytest.raises(ValueError, match=f"ZeroTrainer does not take TrainingArguments\\({row.argument}="):
        sharded(arguments, ZeroConfig())


def test_an_optimizer_or_a_scheduler_of_the_users_own_is_an_error(tmp_path: Path) -> None:
    model = seeded(5, gpt2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for given in ((optimizer, None), (None, scheduler)):
        with pytest.raises(ValueError, match=r"ZeroTrainer does not take optimizers=.* optimizer_cls_and_kwargs="):
            ZeroTrainer(model=model, args=training_arguments(tmp_path), train_dataset=DATASET, optimizers=given)


def test_a_config_is_checked_as_the_optimizers_arguments_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb must be a positive number"):
        ZeroConfig(bucket_cap_mb=0)
    with pytest.raises(TypeError, match=r"zero must be a zero.integrations.transformers.ZeroConfig, not 3"):
        ZeroTrainer(model=seeded(5, gpt2), args=training_arguments(tmp_path), zero=3)


def adapters(seed: int, kind: str = "weight") -> nn.Module:
    """Return a model of which only some weights, which all decay, or some biases, of which none does, are trained."""
    model = seeded(seed, gpt2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(f"c_attn.{kind}"))
    return model


def of_model(cls: Any, model: nn.Module, arguments: Any, stage: int = 3, **more: Any) -> Any:
    """Return transformers' Trainer, or a `ZeroTrainer`."""
    if issubclass(cls, ZeroTrainer):
        more["zero"] = ZeroConfig(stage=stage)
    return cls(model=model, args=arguments, train_dataset=DATASET, eval_dataset=DATASET[:6], **more)


@pytest.mark.parametrize(("kind", "stage"), [("weight", 0), ("bias", 3)])
def test_adapters_that_all_or_none_decay_have_the_bits_of_trainer_and_go_on_from_either(
    kind: str, stage: int, tmp_path: Path
) -> None:
    states = []
    for cls in (transformers.Trainer, ZeroTrainer):
        arguments = training_arguments(tmp_path / cls.__name__, **UNCLIPPED)
        states.append(trained(of_model(cls, adapters(5, kind), arguments, stage)))
        saved = torch.load(tmp_path / cls.__name__ / "checkpoint-2" / "optimizer.pt", weights_only=True)
        assert [bool(group["params"]) for group in saved["param_groups"]] == [kind == "weight", kind == "bias"]
    for cls, other in ((transformers.Trainer, "ZeroTrainer"), (ZeroTrainer, "Trainer")):
        later = of_model(cls, adapters(6, kind), training_arguments(tmp_path / "later", **UNCLIPPED), 3 - stage)
        states.append(trained(later, str(tmp_path / other / "checkpoint-2")))
    for state in states[1:]:
        assert_same_dict(state, states[0])


def by_hand(trainer: Any) -> torch.optim.Optimizer:
    trainer.optimizer = torch.optim.SGD(
        [{"params": trainer.model.transformer.parameters(), "lr": 0.3}], lr=0.1, momentum=0.9
    )
    return trainer.optimizer  # type: ignore[no-any-return]


def with_another_rate(trainer: Any) -> torch.optim.Optimizer:
    super(type(trainer), trainer).create_optimizer()
    trainer.optimizer.param_groups[1]["lr"] *= 2
    return trainer.optimizer  # type: ignore[no-any-return]


@pytest.mark.parametrize(("create", "stage"), [(by_hand, 0), (by_hand, 3), (with_another_rate, 2)])
def test_a_subclass_may_build_the_optimizer_itself(create: Any, stage: int, tmp_path: Path) -> None:
    states = []
    for cls in (transformers.Trainer, ZeroTrainer):
        own = type("Own", (cls,), {"create_optimizer": create})
        trainer = of_model(own, seeded(5, gpt2), training_arguments(tmp_path / cls.__name__, **UNCLIPPED), stage)
        states.append(trained(trainer))
        states.append(trained(trainer))  # goes on with the same optimizer, and another schedule
        if cls is ZeroTrainer:
            trainer.zero_optimizer.close()
    assert_same_dict(states[2], states[0])
    assert_same_dict(states[3], states[1])


def sharded_by_hand(trainer: Any) -> None:
    trainer.optimizer = ZeroOptimizer(trainer.model, torch.optim.SGD, stage=1, lr=0.1)


def test_a_subclass_that_builds_a_zero_optimizer_gives_it_the_options(tmp_path: Path) -> None:
    own: Any = type("Own", (ZeroTrainer,), {"create_optimizer": sharded_by_hand})
    taken = own(model=seeded(5, gpt2), args=training_arguments(tmp_path), train_dataset=DATASET)
    taken.train()
    assert taken.zero_optimizer is taken.optimizer.optimizer
    with pytest.raises(ValueError, match=r"ZeroTrainer got zero=\.\.\., and create_optimizer built a ZeroOptimizer"):
        of_model(own, seeded(5, gpt2), training_arguments(tmp_path)).train()
    with pytest.raises(RuntimeError, match=r"ZeroTrainer clips after train\(\) has built the optimizer"):
        of_model(own, seeded(5, gpt2), training_arguments(tmp_path)).accelerator.clip_grad_norm_([], 1.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_second_trainer_goes_on_with_the_model_of_the_first_which_may_be_gone(stage: int, tmp_path: Path) -> None:
    states, losses = [], []
    for cls in (transformers.Trainer, ZeroTrainer):
        model, arguments = seeded(5, gpt2), training_arguments(tmp_path / cls.__name__, max_grad_norm=0.0)
        for rate in (1e-2, 3e-3, 1e-3):
            arguments.learning_rate = rate
            trainer = of_model(cls, model, arguments, stage)
            losses.append(trainer.evaluate()["eval_loss"])
            trainer.save_model(str(tmp_path / "saved"))
            states += [
                state_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")),
                trained(trainer),
            ]
            if rate == 1e-2:
                first = trainer  # lives on, while the second one is gone when the third begins
            trainer = None
            gc.collect()
        losses.append(first.evaluate()["eval_loss"])
    copied = copy.deepcopy(model) if stage < 3 else None
    assert copied is None or trained(of_model(ZeroTrainer, copied, arguments, stage))
    assert losses[:4] == losses[4:]
    for state, other in zip(states[:6], states[6:], strict=True):
        assert_same_dict(other, state)


def by_rank(trainer: Any, *_: Any) -> Any:
    return DistributedSampler(trainer.train_dataset, num_replicas=1, rank=0)


def by_micro_batches(trainer: Any) -> Any:
    sampler = MicroBatchSampler(trainer.train_dataset, 2, 0, 1)
    return trainer.accelerator.prepare(DataLoader(trainer.train_dataset, batch_sampler=sampler))


@pytest.mark.parametrize(
    ("method", "returned", "sampler"),
    [
        ("_get_train_sampler", by_rank, "DistributedSampler"),
        ("get_train_dataloader", by_micro_batches, "MicroBatchSampler"),
    ],
)
def test_a_loader_that_would_be_dealt_out_twice_is_refused(
    method: str, returned: Any, sampler: str, tmp_path: Path
) -> None:
    own: Any = type("Own", (ZeroTrainer,), {method: returned})
    with pytest.raises(ValueError, match=f"ZeroTrainer would deal out what the {sampler} has dealt already"):
        of_model(own, seeded(5, gpt2), training_arguments(tmp_path)).train()


def test_a_class_of_the_users_own_its_groups_and_a_factory_are_taken(tmp_path: Path) -> None:
    class Halving(torch.optim.SGD):
        pass

    def factory() -> Any:
        return lambda model, lr: torch.optim.SGD(model.transformer.h.parameters(), lr=lr)

    def trainer_of(chosen: Any, cls: Any) -> Any:
        arguments = training_arguments(tmp_path, max_grad_norm=0.0)
        return of_model(cls, model, arguments, optimizer_cls_and_kwargs=chosen(model))

    for whole, chosen in (
        (True, lambda _: (Halving, {"lr": 0.1, "momentum": 0.5})),
        (False, lambda model: (Halving, {"params": [{"params": list(model.transformer.h.parameters())}], "lr": 0.1})),
        (False, lambda _: (factory, {"lr": 0.1})),
    ):
        states = []
        for cls in (ZeroTrainer, transformers.Trainer):
            model = seeded(5, gpt2).requires_grad_(whole)
            model.transformer.h.requires_grad_()
            states.append(trained(trainer_of(chosen, cls)))
        assert_same_dict(*states)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        trainer_of(lambda _: (lambda: None, {}), ZeroTrainer).train()


# -- two ranks ---------------------------------------------------------------------------------------------------------

COMPILED = {
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
}  # as a whole: another graph at stage 3
RUNS: list[tuple[ZeroConfig, dict[str, Any]]] = [
    (ZeroConfig(stage=0), {"bf16": True}),
    (ZeroConfig(stage=1), {CHECKPOINTING: True}),
    (ZeroConfig(stage=2), COMPILED),
    (ZeroConfig(stage=3), {}),
    (ZeroConfig(stage=3), {"bf16": True}),
]
HALF: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
UNCLIPPED: dict[str, Any] = {**HALF, "max_grad_norm": 0.0}


def train_on_two_ranks(started: dict[str, Any], folder: Path) -> list[Any]:
    """Train, and train on from the checkpoint at half the steps.

    Return for each run: the model's inputs in the order of the micro-batches (not of a compiled one), its state after
    either training, the evaluation loss and the predictions of either.
    """
    results = []
    for number, (zero, changes) in enumerate(RUNS):
        arguments = training_arguments(folder / f"run-{number}", **HALF, **changes)
        names = variables(started, zero.stage, args=arguments, dataset=DATASET, model=seeded(5, gpt2))
        calls: list[dict[str, Tensor]] = []
        if changes is not COMPILED:
            handle = note_inputs(names["model"], calls)
        exec(code_of("Trainer"), names)
        if changes is not COMPILED:
            handle.remove()
        trainer = names["trainer"]
        trainer.zero_optimizer.check_replicas()
        later = sharded(arguments, zero, seed=6)
        resumed = trained(later, str(folder / f"run-{number}" / "checkpoint-2"))
        outcomes = []
        for one in (trainer, later):
            outcomes.append((one.evaluate(DATASET)["eval_loss"], one.predict(DATASET[:5]).predictions))
            one.zero_optimizer.close()
        results.append((by_micro_batch(calls), state_of(names["model"]), resumed, outcomes))
    return [results, *further(folder), unequal(folder), *second(folder)]


def further(folder: Path) -> list[Any]:
    """Go on from the checkpoint of Trainer in one process; train a part of the model with master weights.

    Return: the state at the end of the first, that of a model of which few weights are trained, which goes on from
    Trainer's checkpoint, too, and that of the last after training, after going on from its checkpoint in the sharded
    model, and after going on in another model.
    """
    arguments = training_arguments(folder / "two", **UNCLIPPED)
    more = trained(sharded(arguments, ZeroConfig(stage=3), seed=6), str(folder / "one" / "checkpoint-2"))
    low_rank = of_model(ZeroTrainer, adapters(6), training_arguments(folder / "low", **UNCLIPPED))
    low = trained(low_rank, str(folder / "low-one" / "checkpoint-2"))
    trained(sharded(arguments, ZeroConfig(stage=3)))  # leaves a checkpoint
    states = []
    arguments, half = training_arguments(folder / "part", **HALF), str(folder / "part" / "checkpoint-2")
    for resumptions in ((None, half), (half,)):
        trainer = sharded(arguments, ZeroConfig(stage=3, mixed_precision=MixedPrecision(torch.bfloat16)))
        trainer.model.transformer.wte.requires_grad_(False)
        states += [trained(trainer, resume) for resume in resumptions]
        trainer.save_model(str(folder / "saved"))
        trainer.zero_optimizer.close()
    return [more, low, states]


def unequal(folder: Path) -> list[str]:
    """Return the errors of rank 0 in a training and an evaluation in which the ranks have unequal datasets."""
    trainer = sharded(training_arguments(folder / "unequal"), ZeroConfig(stage=3))
    shorter = DATASET[: 6 + trainer.args.process_index]
    trainer.train_dataset = shorter
    errors = [error_of(trainer.train), error_of(trainer.evaluate, shorter)]
    assert trainer.zero_optimizer is None
    return errors


def second(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Return the state of a sharded model after a second trainer, and the error of the first one then."""
    model, arguments = seeded(5, gpt2), training_arguments(folder / "second", **UNCLIPPED)
    first = of_model(ZeroTrainer, model, arguments)
    first.train()
    return trained(of_model(ZeroTrainer, model, arguments)), error_of(first.train)


def loss_of(changes: dict[str, Any], compiled: dict[nn.Module, Any]) -> Any:
    def loss(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        if changes is COMPILED and model not in compiled:
            compiled[model] = torch.compile(model, backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in changes):
            found: Tensor = compiled.get(model, model)(**call).loss
        return found.float() * WORLD_SIZE  # as Trainer scales it

    return loss


def test_two_ranks_train_the_bits_of_the_plain_loop_and_training_goes_on_at_another_number(tmp_path: Path) -> None:
    undisturbed = trained(plain(of_one_process(tmp_path / "one", **UNCLIPPED)))
    few = of_model(transformers.Trainer, adapters(5), of_one_process(tmp_path / "low-one", **UNCLIPPED))
    expected_of_few = trained(few)
    expected_of_two = [trained(plain_of_two) for plain_of_two in two_plain_trainers(tmp_path / "second-one")][-1]
    results, more, low, (first, *others), errors, twice, closed = launch(
        f"{__name__}:train_on_two_ranks", tmp_path, limit=280
    )
    for name, error in zip(("train_dataset", "evaluation dataset"), errors, strict=True):
        assert f"the length of the {name} is 6 on rank 0 and 7 on rank 1: give all ranks the same" in error
    inputs, compiled = results[0][0], dict[nn.Module, Any]()
    assert len(inputs) == 16
    for (zero, changes), (calls, state, resumed, outcomes) in zip(RUNS, results, strict=True):
        expected = state_of(plain_trainer(loss_of(changes, compiled), calls or inputs))
        assert_same_dict(state, expected)
        assert_same_dict(resumed, expected)
        (loss, logits), (other_loss, other_logits) = outcomes
        assert other_loss == loss
        numpy.testing.assert_array_equal(other_logits, logits)
        if zero.stage == 3 and not changes:
            folder = tmp_path / f"run-{RUNS.index((zero, changes))}"
            later = sharded(of_one_process(folder, **HALF), ZeroConfig(stage=2), seed=6)
            assert_same_dict(trained(later, str(folder / "checkpoint-2")), expected)
            assert later.evaluate(DATASET)["eval_loss"] == loss
    assert_same_dict(twice, expected_of_two)
    assert "was closed, by close() or by another trainer of the same model: build a new ZeroTrainer" in closed
    assert_same_dict(low, expected_of_few)
    assert_same_dict(more, undisturbed)  # on two ranks, from Trainer's checkpoint in one process
    back = trained(plain(of_one_process(tmp_path / "two", **UNCLIPPED), seed=6), str(tmp_path / "two/checkpoint-2"))
    assert_same_dict(back, undisturbed)
    for state in others:
        assert_same_dict(state, first)
    assert {value.dtype for value in first.values()} == {torch.bfloat16}
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert_same_dict(state_of(saved), first)


def two_plain_trainers(folder: Path) -> Iterator[Any]:
    """Yield two of transformers' own Trainer, the second one of the model that the first one has trained."""
    model = seeded(5, gpt2)
    for _ in range(2):
        yield of_model(transformers.Trainer, model, of_one_process(folder, **UNCLIPPED))


def of_one_process(folder: Path, **others: Any) -> Any:
    """Return the arguments with which one process takes the micro-batches of two ranks."""
    return training_arguments(folder, gradient_accumulation_steps=4, **others)


# -- imports and scripts -----------------------------------------------------------------------------------------------


def test_the_library_itself_imports_neither_transformers_nor_accelerate() -> None:
    imports = "import sys, zero.integrations, zero.verify, zero.checkpoint"
    code = f"{imports}; print({{'transformers', 'accelerate'}} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.stdout == "set()\n", ended.stderr


def digest_of(text: str) -> str:
    """Return the SHA-256 of the last line that a script of `zero.examples` prints."""
    word, digest = text.splitlines()[-1].split()
    assert word == "SHA-256"
    return digest


def run_on_two_ranks(name: str, folder: Path, *words: str) -> str:
    """Run a script of `zero.examples`; return its SHA-256."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", f"zero.examples.{name}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    return digest_of(ended.stdout)


def run_alone(main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a script's ``main`` in this process; return its SHA-256."""
    monkeypatch.setattr(sys, "argv", ["script", *words])
    main()
    return digest_of(capsys.readouterr().out)


def test_the_script_of_trainer_goes_on_at_another_stage_and_number_of_ranks_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--output_dir", str(tmp_path / "run"), "--max_steps=6", "--save_steps=3", "--eval_steps=3")
    expected = run_alone(hf_trainer.main, monkeypatch, capsys, *words, "--stage=1")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert run_on_two_ranks("hf_trainer", tmp_path, *words, "--stage=3") == expected


def test_the_script_of_trainer_names_the_flag_of_a_file_without_text() -> None:
    for name in ("", "/dev/null"):
        with pytest.raises(SystemExit, match=f"^--data '{name}' must be a file of at least 640 bytes$"):
            hf_trainer.samples(name)


def test_the_script_of_low_rank_adapters_has_the_same_bits_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run_alone(finetune_lora.main, monkeypatch, capsys, "--epochs=2", "--stage=0")
    assert run_on_two_ranks("finetune_lora", tmp_path, "--epochs=2", "--adapters=adapters.pt") == expected
    adapters = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert len(adapters) == 2 * 9
    assert all(name.endswith((".down", ".up")) for name in adapters)
