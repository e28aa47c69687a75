"""Mutants of the errors of failed ranks: their text, and which ranks raise them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mutant import Edit, Mutant, Wrap

CLOSE = "test_close.py"
TAKEN = f"{CLOSE}::test_every_call_of_the_older_names_the_takeover_and_its_close_leaves_the_newer_alone"

TOLD = "test_messages.py"
VERIFY = "commands/test_verify.py"
DEVICES = "parameters/test_devices.py"


def nothing(_: Any) -> Callable[..., None]:
    return lambda *_: None


MUTANTS = (
    Mutant(
        "a-further-parameter-brings-its-gradient",
        ("L13", "L8"),
        "`add_param_group` takes a parameter with a gradient, which the next backward finds, perhaps on one rank.",
        (Wrap("zero.gradients.hooks.check_no_gradients", nothing),),
        ("test_errors.py::test_a_further_parameter_with_a_gradient_is_refused_on_every_rank_until_that_is_none[2]",),
    ),
    Mutant(
        "a-schedule-free-class-is-taken-for-another",
        ("L12",),
        "A class that needs train() and eval() is refused for looking at other parameters, which it does not.",
        (Wrap("zero.step.trial.check_steps_alone", nothing),),
        ("step/test_partition.py::test_the_reason_against_a_schedule_free_class_is_the_calls_that_it_needs[None]",),
    ),
    Mutant(
        "a-step-does-not-wait-for-another-stream",
        ("S19", "S20"),
        "A step on another stream than its backward's reads gradients that are still on their way.",
        (
            Edit(
                "zero.runtime.streams.Streams._follow",
                "                current.wait_stream(last)\n",
                "                pass\n",
            ),
        ),
        (f"{DEVICES}::test_each_part_of_a_step_waits_for_the_one_before_on_whatever_stream_it_is[1-1]",),
    ),
    Mutant(
        "the-first-stream-alone-is-waited-for",
        ("S19",),
        "What other streams were told since is not waited for.",
        (
            Edit(
                "zero.runtime.streams.Streams._follow",
                "            self._last[device] = current\n",
                "            self._last[device] = last or current\n",
            ),
        ),
        (f"{DEVICES}::test_each_part_of_a_step_waits_for_the_one_before_on_whatever_stream_it_is[1-2]",),
    ),
    Mutant(
        "a-second-device-is-taken-in-silence",
        ("L5",),
        "Hooks of parameters on two devices run in two threads at once.",
        (
            Edit(
                "zero.core.parameter_specs.check_one_device",
                "        if spec.device != trained[0].device:\n",
                "        if False:\n",
            ),
        ),
        (f"{DEVICES}::test_what_is_trained_is_on_one_device",),
    ),
    Mutant(
        "a-default-device-is-overruled",
        ("L19",),
        "A model from the meta device lands on a GPU although the user set the CPU.",
        (
            Edit(
                "zero.config.Config.landing",
                " or any(isinstance(mode, DeviceContext) for mode in modes)",
                "",
            ),
        ),
        (f"{DEVICES}::test_a_model_without_memory_lands_on_the_accelerator_that_nccl_serves",),
    ),
    Mutant(
        "a-backward-inside-a-loss-goes-unseen-once-there-are-gradients",
        ("L1",),
        "`zero.verify` looks for new gradients alone: from the second micro-batch on a backward adds to old ones.",
        (
            Edit(
                "zero.commands.verify.ranks.Workload.backward",
                "        self.several_backwards |= any(",
                "        self.several_backwards = any(",
            ),
            Edit(
                "zero.commands.verify.ranks.Workload.backward",
                "p.grad is not g or _version(p.grad) != version for",
                "p.grad is not g for",
            ),
        ),
        (f"{VERIFY}::test_a_loss_that_runs_a_backward_itself_is_told_that_the_order_is_by_rounds",),
    ),
    Mutant(
        "a-cast-parameter-shows-its-local-gradient",
        ("L2",),
        "Where torch refuses a placeholder, what this rank alone has found stays in p.grad, and the backward goes on.",
        (
            Edit(
                "zero.gradients.grad_slots.GradSlots.put_placeholder",
                "            bucket.parameters[slot].grad = bucket.published[slot] = None\n"
                "            return refused\n",
                "            return None\n",
            ),
        ),
        (f"{TOLD}::test_a_model_that_was_cast_is_told_in_our_words[backward-construction-torch.float64-1]",),
    ),
    Mutant(
        "who-has-a-state-is-the-rank-in-the-replica",
        ("L12", "R4"),
        "The ranks that are named as owners of a state are those of the first replica.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage.owners",
                "first, spec = self._transport.rank - self._shards.rank, bucket.spec",
                "first, spec = 0, bucket.spec",
            ),
        ),
        (f"{TOLD}::test_states_are_this_ranks_piece_or_say_who_has_them[1-2]",),
    ),
    Mutant(
        "a-close-fails-for-what-it-lost",
        ("L3",),
        "The first close() after a parameter was replaced raises instead of telling what is lost.",
        (Edit("zero.engine.Engine._lost", '            return f"{error}{of}"\n', "            raise\n"),),
        (
            f"{CLOSE}::test_close_works_at_the_first_call_says_what_is_lost_and_another_optimizer_trains_on[1-replace-1]",
        ),
    ),
    Mutant(
        "a-close-hides-the-error-before-it",
        ("L3",),
        "In the user's `finally`, what close() cannot do takes the place of the error that ended the training.",
        (
            Edit(
                "zero.optimizer.ZeroOptimizer.close",
                "            if first is None:\n                raise\n",
                "            raise\n",
            ),
        ),
        (f"{CLOSE}::test_a_close_that_fails_never_hides_the_error_before_it[in_finally-1]",),
    ),
    Mutant(
        "what-is-not-listed-is-taken-over-in-silence",
        ("L12",),
        "Stage 3 shards parameters that an older optimizer trains, and that one is not told.",
        (
            Edit(
                "zero.setup.extend",
                "                parts.reducer.hooks.take_over(parameter)\n",
                "                pass\n",
            ),
        ),
        (f"{TAKEN}[1-3-others, of the same module]",),
    ),
)
