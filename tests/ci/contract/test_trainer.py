"""`ZeroTrainer` trains, saves and goes on with the bits of Trainer, whose arguments it obeys or refuses."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from zero import MicroBatchSampler, MixedPrecision, ZeroOptimizer, clip_grad_norm_

from ...contract.recipes import assert_same_dict
from ...support.errors import assert_in_order, error_of
from ...support.launched import launch
from ...support.loops import code_of, seeded
from ...support.refused import REFUSED
from .ecosystem import DATASET, gpt2, state_of, variables
from .ecosystem import training_arguments as arguments_of

transformers = pytest.importorskip("transformers")
Accelerator = pytest.importorskip("accelerate").Accelerator

from zero.integrations.transformers import ZeroConfig, ZeroTrainer  # noqa: E402

pytestmark = pytest.mark.timeout(300)
Trainer = transformers.Trainer
UNCLIPPED = {"max_grad_norm": 0.0}  # the norm of Trainer's own clip has other last bits than `zero.clip_grad_norm_`
HALF: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
BATCHES = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 2}
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


def trainer_of(cls: Any, model: nn.Module, arguments: Any, stage: int = 3, **more: Any) -> Any:
    if issubclass(cls, ZeroTrainer):
        more = {"zero": ZeroConfig(stage=stage), **more}
    return cls(model=model, args=arguments, train_dataset=DATASET, eval_dataset=DATASET[:6], **more)


def trained(trainer: Any, resume: str | None = None) -> dict[str, Tensor]:
    trainer.train(resume_from_checkpoint=resume)
    if isinstance(trainer, ZeroTrainer):
        with trainer.zero_optimizer.gathered():
            return state_of(trainer.model)
    return state_of(trainer.model)


def model_of(seed: int = 5, trains: Callable[[str], bool] = lambda name: True) -> Any:
    """Return a model, of which parameters of some names are trained."""
    model = seeded(seed, gpt2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    return model


FIELDS = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
CHECKPOINTING = "gradient_checkpointing"  # before 5.23
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else CHECKPOINTING
FREE = ("adamw", "radam") if importlib.util.find_spec("schedulefree") else ()


def by_hand(trainer: Any) -> torch.optim.Optimizer:
    groups = [{"params": trainer.model.transformer.parameters(), "lr": 0.3}]
    trainer.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return trainer.optimizer  # type: ignore[no-any-return]


def with_another_rate(trainer: Any) -> torch.optim.Optimizer:
    super(type(trainer), trainer).create_optimizer()
    trainer.optimizer.param_groups[1]["lr"] *= 2
    return trainer.optimizer  # type: ignore[no-any-return]


class Halving(torch.optim.SGD):
    """A class of the user's own."""


def factory() -> Any:
    return lambda model, lr: torch.optim.SGD(model.transformer.h.parameters(), lr=lr)


@dataclass(frozen=True)
class Case:
    """What changes a training: arguments, a method of a subclass, which parameters are trained, and the optimizer."""

    changes: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    trains: Callable[[str], bool] = lambda name: True
    chosen: Callable[[Any], Any] | None = None


def in_blocks(name: str) -> bool:
    return "transformer.h." in name


NOISY = {"neftune_noise_alpha": 5.0, "bf16": True, "train_sampling_strategy": "batch_rebalance"}
SMOOTH = {"label_smoothing_factor": 0.1, CHECKPOINTING: True, "full_determinism": True}
DISPATCHED = {"debug": "underflow_overflow", "accelerator_config": {"dispatch_batches": True}, "eval_on_start": True}
SPLIT = {"accelerator_config": {"split_batches": True, "use_seedable_sampler": False}, "use_cache": True}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, **EVALUATED}
BEST = {"load_best_model_at_end": True, "save_strategy": "best", "learning_rate": 1.0, **EVALUATED}
CASES = [
    *map(
        Case,
        (
            {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "cosine", "warmup_steps": 0.5, **NOISY},
            {
                "optim": "adamw_torch",
                "adam_beta1": 0.8,
                "adam_epsilon": 1e-5,
                "lr_scheduler_type": "constant",
                **SMOOTH,
            },
            {"optim": "adagrad", "max_steps": 3, "dataloader_drop_last": True, **BATCHES, **DISPATCHED},
            {"optim": "rmsprop", "gradient_accumulation_steps": 3, "average_tokens_across_devices": False, **SPLIT},
            {"optim": "adafactor", "train_sampling_strategy": "sequential", **PLATEAU},
            {"optim": "adamw_torch_8bit", "weight_decay": 0.0, "data_seed": 7, **BEST},
            {"torch_compile": True, "torch_compile_backend": "aot_eager"},
            *({"optim": f"schedule_free_{name}", "lr_scheduler_type": "constant", **EVALUATED} for name in FREE),
        ),
    ),
    Case(trains=lambda name: name.endswith("c_attn.bias")),  # none of them decays
    Case(own={"create_optimizer": by_hand}),
    Case(own={"create_optimizer": with_another_rate}),
    Case(chosen=lambda _: (Halving, {"lr": 0.1, "momentum": 0.5})),
    Case(trains=in_blocks, chosen=lambda model: (Halving, {"params": list(model.transformer.h.parameters())})),
    Case(trains=in_blocks, chosen=lambda _: (factory, {"lr": 0.1})),
]


def outcome(cls: Any, case: Case, folder: Path, stage: int) -> tuple[Any, ...]:
    """Return the state after a training, the evaluation's loss, and predictions."""
    model, arguments = model_of(trains=case.trains), arguments_of(folder, **UNCLIPPED, **case.changes)
    more = {} if case.chosen is None else {"optimizer_cls_and_kwargs": case.chosen(model)}
    trainer = trainer_of(type("Own", (cls,), case.own), model, arguments, stage, **more)
    torch.manual_seed(0)
    with torch.compiler.set_stance("default" if arguments.torch_compile else "force_eager"):  # torchao compiles steps
        state = trained(trainer)
    found = state, trainer.evaluate()["eval_loss"], trainer.predict(DATASET[:5]).predictions
    if cls is ZeroTrainer:
        trainer.zero_optimizer.close()
    return found


@pytest.mark.filterwarnings("ignore:Adafactor is not element-wise")
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_obeyed_has_the_bits_of_trainer(stage: int, tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        if number % 2 == stage % 2:
            state, loss, logits = outcome(Trainer, case, tmp_path / f"plain-{number}", stage)
            ours, our_loss, our_logits = outcome(ZeroTrainer, case, tmp_path / f"zero-{number}", stage)
            assert_same_dict(ours, state)
            assert our_loss == loss, case
            numpy.testing.assert_array_equal(our_logits, logits)


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
    trainer = trainer_of(ZeroTrainer, model_of(), transformers.TrainingArguments(str(tmp_path)))
    assert trainer.zero_optimizer is None
    for row in REFUSED:
        arguments = arguments_of(tmp_path)
        setattr(arguments, row.argument, row.value)  # some are refused by transformers itself without a GPU
        said = error_of(trainer_of, ZeroTrainer, model_of(), arguments)
        assert said.startswith(f"ValueError: ZeroTrainer does not take TrainingArguments({row.argument}="), said


def sharded_by_hand(trainer: Any) -> None:
    trainer.optimizer = ZeroOptimizer(trainer.model, torch.optim.SGD, stage=1, lr=0.1)


def by_rank(trainer: Any, *_: Any) -> Any:
    return DistributedSampler(trainer.train_dataset, num_replicas=1, rank=0)


def by_micro_batches(trainer: Any) -> Any:
    sampler = MicroBatchSampler(trainer.train_dataset, 2, 0, 1)
    return trainer.accelerator.prepare(DataLoader(trainer.train_dataset, batch_sampler=sampler))


def own(method: str, call: Any) -> Callable[[Any], Any]:
    cls = type("Own", (ZeroTrainer,), {method: call})
    return lambda arguments: trainer_of(cls, model_of(), arguments).train()


def with_(**more: Any) -> Callable[[Any], Any]:
    return lambda arguments: trainer_of(ZeroTrainer, model_of(), arguments, **more).train()


def clips_before_it_trains(arguments: Any) -> None:
    trainer_of(ZeroTrainer, model_of(), arguments).accelerator.clip_grad_norm_([], 1.0)


class Unfreezing(transformers.TrainerCallback):  # type: ignore[misc, name-defined, unused-ignore]
    def on_step_end(self, *_: Any, **named: Any) -> None:
        named["model"].requires_grad_()


def unfreezes(arguments: Any) -> None:
    trainer_of(ZeroTrainer, model_of(trains=in_blocks), arguments, callbacks=[Unfreezing()]).train()


SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.ConstantLR(SGD)
TWICE = "ValueError: ZeroTrainer would deal out what the {} has dealt already"
ERRORS: dict[str, Callable[[Any], Any]] = {
    "ZeroTrainer does not take optimizers= … optimizer_cls_and_kwargs=": with_(optimizers=(SGD, None)),
    "ZeroTrainer does not take optimizers=": with_(optimizers=(None, SCHEDULER)),
    "bucket_cap_mb must be a positive number": lambda _: ZeroConfig(bucket_cap_mb=0),
    "TypeError: zero must be a zero.integrations.transformers.ZeroConfig, not 3": with_(zero=3),
    TWICE.format("DistributedSampler"): own("_get_train_sampler", by_rank),
    TWICE.format("MicroBatchSampler"): own("get_train_dataloader", by_micro_batches),
    "ValueError: ZeroTrainer got zero=..., and create_optimizer built a Zero": own("create_optimizer", sharded_by_hand),
    "RuntimeError: ZeroTrainer clips after train() has built the optimizer": clips_before_it_trains,
    "RuntimeError … a backward gave a gradient to ' … and no ZeroOptimizer has it": unfreezes,
    "'NoneType' object is not callable": with_(optimizer_cls_and_kwargs=(lambda: None, {})),
}


@pytest.mark.parametrize("words", ERRORS)
def test_what_a_trainer_cannot_take_is_an_error(words: str, tmp_path: Path) -> None:
    assert_in_order(words, error_of(ERRORS[words], arguments_of(tmp_path)))


def test_a_subclass_may_build_the_zero_optimizer_itself(tmp_path: Path) -> None:
    cls: Any = type("Own", (ZeroTrainer,), {"create_optimizer": sharded_by_hand})
    taken = cls(model=model_of(), args=arguments_of(tmp_path), train_dataset=DATASET)
    taken.train()
    assert taken.zero_optimizer is taken.optimizer.optimizer


@pytest.mark.parametrize("stage", [1, 3])
def test_a_second_trainer_goes_on_with_the_model_of_the_first_which_may_be_gone(stage: int, tmp_path: Path) -> None:
    found: list[tuple[list[dict[str, Tensor]], list[float]]] = []
    for cls in (Trainer, ZeroTrainer):
        model, arguments, first = model_of(), arguments_of(tmp_path / cls.__name__, **UNCLIPPED), None
        states, losses = [], []
        for rate in (1e-2, 3e-3, 1e-3):
            arguments.learning_rate = rate
            trainer = trainer_of(cls, model, arguments, stage)
            losses.append(trainer.evaluate()["eval_loss"])
            trainer.save_model(str(tmp_path / "saved"))
            states.append(state_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")))
            states.append(trained(trainer))
            first, trainer = trainer if first is None else first, None  # the second one is gone when the third begins
            gc.collect()
        assert first is not None
        losses.append(first.evaluate()["eval_loss"])
        found.append((states, losses))
    assert "was closed, by close() or by another trainer of the same model: build a new Zero" in error_of(first.train)
    assert stage == 3 or trained(trainer_of(ZeroTrainer, copy.deepcopy(model), arguments, stage))
    assert found[0][1] == found[1][1]
    for state, other in zip(found[0][0], found[1][0], strict=True):
        assert_same_dict(other, state)


RUNS: list[tuple[ZeroConfig, dict[str, Any]]] = [
    (ZeroConfig(stage=0), {"bf16": True}),
    (ZeroConfig(stage=1), {CHECKPOINTING: True}),
    (ZeroConfig(stage=3), {}),
]
MASTERS = ZeroConfig(stage=3, mixed_precision=MixedPrecision(torch.bfloat16))


def train_on_two_ranks(started: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Train by the recipe's block. Then train a part of a model with master weights, and go on from its checkpoint.

    Return the state and the evaluation's loss of each run; the states of the part; and errors of unequal datasets.
    """
    results = []
    for number, (zero, changes) in enumerate(RUNS):
        arguments = arguments_of(folder / f"run-{number}", **changes)
        names = variables(started, zero.stage, args=arguments, dataset=DATASET, model=model_of())
        exec(code_of("Trainer"), names)
        trainer = names["trainer"]
        trainer.zero_optimizer.check_replicas()
        loss = trainer.evaluate(DATASET)["eval_loss"]
        trainer.zero_optimizer.close()
        results.append((state_of(names["model"]), loss))
    arguments, states = arguments_of(folder / "part", **HALF), []
    for resume in (None, str(folder / "part" / "checkpoint-2")):
        trainer = trainer_of(ZeroTrainer, model_of(trains=lambda name: "wte" not in name), arguments, zero=MASTERS)
        states.append(trained(trainer, resume))
        trainer.save_model(str(folder / "saved"))
        trainer.zero_optimizer.close()
    trainer = trainer_of(ZeroTrainer, model_of(), arguments_of(folder / "unequal"))
    trainer.train_dataset = DATASET[: 6 + trainer.args.process_index]
    errors = [error_of(trainer.train), error_of(trainer.evaluate, trainer.train_dataset)]
    return results, states, errors


def test_two_ranks_train_the_bits_of_trainer_in_one_process_and_go_on_from_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda _, *given: clip_grad_norm_(*given))
    results, states, errors = launch(f"{__name__}:train_on_two_ranks", tmp_path, limit=280)
    for number, (state, loss) in enumerate(results):
        changes = {"gradient_accumulation_steps": 4, **RUNS[number][1]}  # the micro-batches of two ranks
        plain = trainer_of(Trainer, model_of(), arguments_of(tmp_path / f"plain-{number}", **changes))
        assert_same_dict(state, trained(plain))
        assert loss == plain.evaluate(DATASET)["eval_loss"]
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    for state in (states[1], state_of(saved)):
        assert_same_dict(state, states[0])
    assert {value.dtype for value in states[0].values()} == {torch.bfloat16}
    for name, error in zip(("train_dataset", "evaluation dataset"), errors, strict=True):
        assert f"the length of the {name} is 6 on rank 0 and 7 on rank 1: give all ranks the same" in error
