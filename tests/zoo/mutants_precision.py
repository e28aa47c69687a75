"""Mutants of mixed precision, loss scaling, `join`, and the messages that these need."""

from __future__ import annotations

from typing import Any

from .mutant import Edit, Mutant, Wrap

RESUMED = "step/test_mixed_cases.py::test_training_goes_on_from_a_saved_dict_as_if_it_had_not_stopped"
UNITS = "gradients/test_join.py::test_units_may_be_there_when_a_block_begins_and_when_a_rank_leaves_it"
TRAINING = "step/test_mixed_precision.py::test_training_is_that_of_the_plain_loop"
NO_SYNC = "step/test_mixed_precision.py::test_what_no_sync_adds_up_is_wide_and_rounded_once"
MADE_IN = "step/test_mixed_precision.py::test_the_model_may_have_been_made_in_any_dtype"
FOLLOW = "step/test_mixed_cases.py::test_masters_follow_what_is_written_into_the_model_element_by_element"
CAST = "step/test_mixed_cases.py::test_inputs_unlisted_parameters_and_asked_for_buffers_are_cast"
EVALUATION = "step/test_mixed_cases.py::test_an_evaluation_between_steps_changes_nothing"
OVERFLOW = "step/test_loss_scaling.py::test_one_element_that_is_not_finite_on_one_rank_skips_the_step_everywhere"
LEFT = "gradients/test_join.py::test_training_is_that_of_the_plain_loop_over_the_union"
CALLS = "gradients/test_join.py::test_a_rank_that_left_makes_every_call_of_the_others"

NEVER_UPDATED = "step/test_mixed_cases.py::test_a_dict_of_weights_that_were_never_updated_says_so"


def rounding_masters(load: Any) -> Any:
    return lambda self, state_dict, groups: load(self, {"masters": {}, **state_dict}, groups)


def leaving_out_empty_masters(dict_of: Any) -> Any:
    def without(self: Any, groups: Any) -> Any:
        found = dict_of(self, groups)
        return {key: value for key, value in found.items() if key != "masters" or value}

    return without


MASTERS = (
    Mutant(
        "masters-of-rounded-weights",
        ("S39",),
        "The model is cast before the masters are made of it: the upcast adds no bit to what was rounded.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage._values",
                "            keep(bucket, whole)\n",
                "            keep(bucket, whole.to(bucket.spec.dtypes.param_dtype).to(whole.dtype))\n",
            ),
        ),
        ("step/test_mixed_cases.py::test_masters_are_rank_0s_wide_values_and_can_be_read[2]",),
    ),
    Mutant(
        "a-model-made-in-16-bits-has-no-wide-masters",
        ("S39",),
        "A weight that the user made in 16 bits is its own master: updates smaller than its last bit are lost.",
        (
            Edit(
                "zero.config.MixedPrecision.of",
                "master = dtype if dtype.itemsize >= 4 else torch.float32",
                "master = dtype",
            ),
        ),
        (f"{MADE_IN}[2-dtype1]",),
    ),
    Mutant(
        "masters-do-not-follow-loaded-weights",
        ("S54",),
        "A step begins with the master weights as they were: what was loaded into the model is overwritten by their "
        "cast.",
        (Edit("zero.step.inner._step", "        states.master.sync_from_param()\n", "        pass\n"),),
        (f"{FOLLOW}[2]",),
    ),
    Mutant(
        "an-edit-rounds-its-neighbours",
        ("L15",),
        "Where one element was written, all of them become what the model computes with: masters lose their low bits.",
        (
            Edit(
                "zero.runtime.master_weights.MasterWeights.sync_from_param",
                "master.copy_(torch.where(written, param.to(master.dtype), master))",
                "master.copy_(param if bool(written.any()) else master)",
            ),
        ),
        (f"{FOLLOW}[2]",),
    ),
    Mutant(
        "masters-follow-within-the-first-block",
        ("S54",),
        "What is written behind the first 65,536 elements of a slice is not seen, and lost at the next step.",
        (
            Edit(
                "zero.runtime.master_weights.MasterWeights.sync_from_param",
                "        for begin in range(0, self._param.numel(), block):\n            param, master",
                "        for begin in range(0, min(block, self._param.numel()), block):\n            param, master",
            ),
        ),
        ("step/test_mixed_cases.py::test_what_is_written_far_behind_the_beginning_counts_too",),
    ),
    Mutant(
        "a-written-sign-of-zero-does-not-count",
        ("L15",),
        "Weights are compared by value: -0.0 that was written over 0.0 is not seen.",
        (
            Edit(
                "zero.runtime.master_weights.MasterWeights.sync_from_param",
                "written = rounded.view(as_integers) != param.view(as_integers)",
                "written = (rounded != param) & (as_integers is not None)",
            ),
        ),
        ("step/test_mixed_cases.py::test_a_zero_that_was_written_has_its_sign",),
    ),
    Mutant(
        "masters-of-a-later-group-are-rounded",
        ("S39",),
        "Parameters that are added to an optimizer get masters that are made of what they were cast to.",
        (
            Edit(
                "zero.setup._NewStates.of",
                "wide, room = self._wide.pop(spec.index, None), ",
                "wide, room = None if before else self._wide.pop(spec.index, None), ",
            ),
        ),
        ("step/test_mixed_cases.py::test_a_group_that_is_added_later_has_masters_of_its_own_wide_values[2]",),
    ),
    Mutant(
        "the-first-of-several-weights-is-cast",
        ("S41",),
        "Of neighbours whose master weights were updated the first one reaches the model.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates.cast",
                "self.master.cast(members[0].begin - self.begin, members[-1].end - self.begin)",
                "self.master.cast(members[0].begin - self.begin, members[0].end - self.begin)",
            ),
        ),
        (f"{TRAINING}[2-bf16-W3]",),
    ),
    Mutant(
        "moments-are-loaded-in-16-bits",
        ("L15",),
        "The loader rounds moments to what the model computes in.",
        (
            Edit(
                "zero.state.plain_dicts.scatter",
                "value.detach().to(device, dtype)",
                "value.detach().to(device, bucket.spec.dtypes.param_dtype)",
            ),
        ),
        (f"{RESUMED}[2-0-model first]",),
    ),
    Mutant(
        "an-evaluation-forgets-the-masters",
        ("S59",),
        "A forward in evaluation mode lets go of the wide weights, which are then made of the narrow ones: the next "
        "checkpoint has 16 bits in 32.",
        (
            Edit(
                "zero.parts.Parts.cast_inputs",
                "                InputCast.put(self.module, self.precision.param_dtype, self)\n",
                "                InputCast.put(self.module, self.precision.param_dtype, self)\n"
                "                self.module.register_forward_pre_hook(self._narrowed)\n"
                "\n"
                "    def _narrowed(self, module, _) -> None:\n"
                "        for bucket in self.storage.buckets if not module.training else ():\n"
                "            if bucket.states.master is not None:\n"
                "                bucket.states.snapshot()\n"
                "                bucket.states.master.forget()\n",
            ),
        ),
        (f"{EVALUATION}[2]",),
    ),
    Mutant(
        "an-evaluation-rounds-the-buffers",
        ("S59",),
        "A forward in evaluation mode casts the buffers to what the model computes in, and leaves them so.",
        (
            Edit(
                "zero.parameters.casting.InputCast.__call__",
                "        return tuple(_cast(arg, dtype) for arg in args), {",
                "        for buffer in [] if module.training else list(module.buffers()):\n"
                "            buffer.copy_(buffer.to(dtype))\n"
                "        return tuple(_cast(arg, dtype) for arg in args), {",
            ),
        ),
        (f"{EVALUATION}[2]",),
    ),
    Mutant(
        "saved-masters-are-those-of-the-last-step",
        ("S54",),
        "A saved dict holds the master weights without what was written into the model since.",
        (
            Edit(
                "zero.state.gather.gather",
                "part = states.synced_weights()",
                "part = states.weights",
            ),
        ),
        ("step/test_mixed_cases.py::test_saved_masters_are_what_the_next_step_would_begin_with",),
    ),
    Mutant(
        "reading-masters-changes-them",
        ("L15",),
        "To read master weights makes them what was written into the model, which may be taken back before a step.",
        (
            Edit(
                "zero.runtime.master_weights.MasterWeights.synced",
                "self._dtype, self._master.clone())",
                "self._dtype, self._master)",
            ),
        ),
        ("step/test_mixed_cases.py::test_reading_masters_changes_nothing[2]",),
    ),
    Mutant(
        "masters-are-dropped",
        ("S57",),
        "The loader takes no master weights: training goes on from rounded ones.",
        (
            Edit(
                "zero.state.plain_dicts.PlainDicts.load",
                "scatter_masters(state_dict[MASTERS], ",
                "scatter_masters({}, ",
            ),
        ),
        (f"{RESUMED}[2-0-model first]",),
    ),
    Mutant(
        "masters-of-before-outlive-a-load",
        ("S53",),
        "After a dict whose master weights were never updated those of later steps stay.",
        (Edit("zero.state.plain_dicts.scatter_masters", "        states.master.forget()\n", ""),),
        (NEVER_UPDATED,),
    ),
    Mutant(
        "a-dict-without-masters-rounds-them",
        ("S39", "S54"),
        "After a dict of torch, of an fp32 run or of DeepSpeed training goes on from rounded master weights.",
        (Wrap("zero.state.plain_dicts.PlainDicts.load", rounding_masters),),
        ("step/test_mixed_cases.py::test_a_dict_without_masters_keeps_those_that_round_to_the_model[3]",),
    ),
    Mutant(
        "a-dict-without-an-update-looks-like-a-plain-one",
        ("S53",),
        "A dict does not say that its master weights were never updated: those of later steps outlive its load.",
        (Wrap("zero.state.plain_dicts.PlainDicts.dict_of", leaving_out_empty_masters),),
        (NEVER_UPDATED,),
    ),
    Mutant(
        "whatever-is-frozen-has-masters",
        ("L7",),
        "Weights that were never updated get wide ones, too, at the first step.",
        (
            Edit(
                "zero.runtime.flat_states.BucketStates.cast",
                "                if is_present:\n",
                "                if members:\n",
            ),
        ),
        ("step/test_mixed_cases.py::test_what_is_never_trained_has_no_master_weights[2]",),
    ),
)

SUMS = (
    Mutant(
        "the-reduce-dtype-is-ignored",
        ("S37",),
        "Gradients travel in what the model computes in, whatever `reduce_dtype` says.",
        (
            Edit(
                "zero.config.MixedPrecision.of",
                "return Dtypes(self.param_dtype, self.travel,",
                "return Dtypes(self.param_dtype, self.param_dtype,",
            ),
        ),
        (f"{TRAINING}[2-fp32, sent in bf16-W2]",),
    ),
    Mutant(
        "one-rank-sends-nothing-narrow",
        ("S37",),
        "With one rank a contribution is put where the sum is, in its dtype, and not rounded to what travels.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._to_travel",
                "not self.has_sum and not bucket.dtypes.widens:",
                "not self.has_sum:",
            ),
        ),
        (f"{TRAINING}[2-fp32, sent in bf16-W1]",),
    ),
    Mutant(
        "a-16-bit-sum-is-rounded-once",
        ("S37",),
        "Sums that were asked for in 16 bits are formed in 32 and rounded at the end: not the accumulator that was "
        "declared.",
        (
            Edit(
                "collectives.algorithms.ordered_sum.ordered_sum",
                "    running = torch.empty(min(block, size), dtype=out.dtype, device=out.device)\n",
                "    kept = torch.float32 if out.itemsize == 2 else out.dtype\n"
                "    running = torch.empty(min(block, size), dtype=kept, device=out.device)\n",
            ),
        ),
        (f"{TRAINING}[2-bf16, added up in bf16-W3]",),
    ),
    Mutant(
        "no-sync-adds-up-in-what-travels",
        ("S37",),
        "What `no_sync` keeps is as narrow as what travels: each micro-batch is rounded.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._open",
                "        if travels or not self.bucket.dtypes.widens:\n            self._local",
                "        if travels or not self.bucket.dtypes.widens or self.has_sum is not None:\n"
                "            self._local",
            ),
        ),
        (f"{NO_SYNC}[2-bf16]",),
    ),
    Mutant(
        "a-fresh-gradient-beside-wide-ones-is-nothing",
        ("S38",),
        "A parameter that is first used in the last micro-batch has a narrow gradient where the others were added up "
        "in a wide one: it is left out.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.flush",
                "            if first:\n",
                "            if first and travels and self._local.data.dtype is not self.bucket.dtypes.reduce_dtype:\n"
                "                torch._foreach_zero_([self._view(slot) for slot in first])\n"
                "            elif first:\n",
            ),
        ),
        (f"{NO_SYNC}[2-bf16]",),
    ),
    Mutant(
        "stage-0-rounds-its-means",
        ("S6",),
        "At stage 0 alone the wide means are gathered into what travels, and so rounded to 16 bits.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.gather_means",
                "            self._whole = self._empty(Placement.WHOLE, self.bucket.dtypes.accumulate_dtype)\n",
                "            self._whole = self._empty(Placement.WHOLE, self.bucket.dtypes.reduce_dtype)\n",
            ),
        ),
        (f"{TRAINING}[0-bf16-W2]",),
    ),
    Mutant(
        "an-unused-parameter-ends-the-norm",
        ("S34",),
        "The norm leaves out what lies in a bucket behind a parameter that no rank used.",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans._intervals",
                "_joined([piece for piece in pieces_of(bucket) if bucket.used[piece.slot]])",
                "_joined([p for p in pieces_of(bucket) if all(bucket.used[: p.slot + 1])])",
            ),
        ),
        ("contract/test_exact.py::test_clipping_is_that_of_the_plain_loop_for_every_norm[2-2.0]",),
    ),
    Mutant(
        "an-unused-parameter-decides-the-norm-s-dtype",
        ("S34",),
        "An fp64 parameter that no rank used makes the norm fp64, and so the clip factor.",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans.any_is_double",
                "        return any(1 in bucket.used for bucket in doubles)\n",
                "        return bool(doubles)\n",
            ),
        ),
        ("core/test_norm.py::test_a_parameter_that_no_rank_used_has_no_part_in_the_norm_not_even_its_dtype[2]",),
    ),
    Mutant(
        "stage-0-steps-with-the-means-of-before",
        ("L2",),
        "At stage 0, where means are not shown and so gathered once, those of the first step count as those of now.",
        (
            Edit(
                "zero.gradients.reducer.Reducer._round_is_over",
                "        self._schedule.sums_changed()\n        if not self.means",
                "        if not self.means",
            ),
        ),
        (f"{TRAINING}[0-bf16-W2]",),
    ),
    Mutant(
        "a-zero-of-one-rank-is-nothing-elsewhere",
        ("L11",),
        "At stage 0 a gradient that was zeroed before ranks agreed on who has one counts as known to all: in the other "
        "ranks' slices it is -0.0.",
        (
            Edit(
                "zero.gradients.grad_slots.GradSlots._used_is_known",
                "        return (self.means_are_shown and not",
                "        return (self._stage.grads_replicated and not",
            ),
        ),
        ("step/test_mixed_cases.py::test_a_gradient_that_one_rank_used_and_all_zeroed_is_zero_in_every_slice[0]",),
    ),
)

CASTS = (
    Mutant(
        "inputs-inside-containers-are-not-cast",
        ("L15",),
        "What a module is called with is cast where it is a tensor, and not inside tuples, lists and dicts.",
        (
            Edit(
                "zero.parameters.casting._cast",
                "        return type(value)(_cast(item, dtype) for item in value)\n",
                "        return value\n",
            ),
        ),
        (f"{CAST}[2-True]",),
    ),
    Mutant(
        "what-is-not-listed-stays-wide",
        ("L15",),
        "Parameters of the module that are not updated keep their dtype, and what is computed with them is wide again.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage._cast_rest",
                "            cast([parameter for _, parameter in self._others()], self._precision.param_dtype)\n",
                "            cast([], self._precision.param_dtype)\n",
            ),
        ),
        (f"{CAST}[2-True]",),
    ),
    Mutant(
        "a-closed-model-goes-on-casting",
        ("L15",),
        "After `close()` the model still casts what it is called with.",
        (
            Edit(
                "zero.parts.Parts.release",
                "            InputCast.remove(self.module, self)\n        self.reducer.close()\n",
                "            self.module.zero_grad()\n        self.reducer.close()\n",
            ),
        ),
        (f"{CAST}[2-True]",),
    ),
)

SCALING = (
    Mutant(
        "an-overflow-enters-the-moments",
        ("S35",),
        "The object says that it looks at a scaler's verdict itself, as torch's fused classes do, and does not: the "
        "moments of a step that should be skipped become infinite.",
        (
            Edit(
                "zero.optimizer.ZeroOptimizer.__init__",
                "        self._built = True\n",
                "        self._built = True\n        self._step_supports_amp_scaling = True\n",
            ),
        ),
        (f"{OVERFLOW}[2-None-W3]",),
    ),
    Mutant(
        "only-its-owner-knows-of-an-overflow",
        ("L16",),
        "The rank that owns an element that is not finite skips the step, and the others take it.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.unscale",
                "any(told[0] for told in self._transport.exchange(mine, tag))",
                "self._transport.exchange(mine, tag)[self._transport.rank][0] > 0",
            ),
        ),
        (f"{OVERFLOW}[2-None-W3]",),
    ),
    Mutant(
        "unscaled-once-for-each-dtype",
        ("S36",),
        "A scaler asks once for each dtype of gradients, and each time all of them are unscaled.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.unscale",
                "        if self._found.repeats(found, may_be_new=self._schedule.is_open):\n            return\n",
                "",
            ),
        ),
        ("step/test_loss_scaling.py::test_a_scaler_asks_once_for_each_dtype_and_all_are_unscaled_once[2]",),
    ),
    Mutant(
        "stage-0-unscales-its-own-slice",
        ("S6",),
        "At stage 0, where every rank steps all elements, each takes the scale out of its own slice.",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans.unscale",
                "lambda bucket: bucket.states.pieces",
                "lambda bucket: bucket.grad.pieces",
            ),
        ),
        (f"{OVERFLOW}[0-fp16-W2]",),
    ),
    Mutant(
        "unscaled-by-the-scale-of-another-step",
        ("R1", "R3"),
        "A scale is taken out that did not make the gradients: where it grew or fell in between, they are twice or "
        "half as large.",
        (
            Edit(
                "zero.gradients.owned_means.OwnedMeans.unscale",
                "        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}\n",
                '        inverse, self._kept = getattr(self, "_kept", inverse), inverse.clone()\n'
                "        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}\n",
            ),
        ),
        (f"{OVERFLOW}[2-None-W3]",),
    ),
    Mutant(
        "scales-are-not-compared",
        ("L16",),
        "Each rank takes out the loss scale of its own scaler, and none notices that they differ.",
        (Edit("zero.gradients.agreement.check", "if record.scale != first.scale:", "if first.divisor is None:"),),
        ("step/test_loss_scaling.py::test_scales_that_differ_between_ranks_are_an_error_on_every_rank[2]",),
    ),
    Mutant(
        "a-skipped-step-is-not-cleared",
        ("S5",),
        "`zero_grad` takes gradients that were unscaled and not stepped with for already cleared: an overflow stays.",
        (
            Edit(
                "zero.gradients.grad_slots.GradSlots.zero_grad",
                "            self._schedule.clear()\n        else",
                "            if self._schedule.phase.name != 'DIVIDED':\n"
                "                self._schedule.clear()\n        else",
            ),
        ),
        (f"{OVERFLOW}[2-None-W3]",),
    ),
)

JOINING = (
    Mutant(
        "rank-0-s-tokens-count-for-all",
        ("S16",),
        "`sum_over_ranks` takes every rank's number for rank 0's: equal on all ranks, and wrong where they differ.",
        (
            Edit(
                "zero.engine.Engine.sum_over_ranks",
                "        return sum(told) if all(",
                "        told = told[:1] * len(told)\n        return sum(told) if all(",
            ),
        ),
        (f"{LEFT}[2-counts0-None]",),
    ),
    Mutant(
        "sums-over-ranks-are-rounded-at-each-rank",
        ("L1",),
        "`sum_over_ranks` adds floats up one after another: a small number is lost between large ones.",
        (Edit("zero.engine.Engine.sum_over_ranks", "else math.fsum(told)", "else float(sum(told))"),),
        ("gradients/test_join.py::test_sums_over_ranks_are_exact_and_equal_everywhere",),
    ),
    Mutant(
        "who-left-keeps-its-divisor",
        ("S16",),
        "A rank that has run out of batches divides by the tokens of its own last step.",
        (
            Edit(
                "zero.engine.Engine._follow",
                "        if self._reducer.divisor != call.divisor:\n"
                "            self._reducer.set_divisor(call.divisor)\n",
                "",
            ),
        ),
        (f"{LEFT}[2-counts0-None]",),
    ),
    Mutant(
        "who-left-keeps-its-learning-rate",
        ("L14",),
        "A rank that has run out of batches steps its slices with the learning rate of its own last step.",
        (Edit("zero.engine.Engine._follow", "        adopt_options(groups, call.options)\n", ""),),
        (f"{LEFT}[2-counts0-None]",),
    ),
    Mutant(
        "units-stay-over-the-end-of-a-turn",
        ("L14",),
        "What a rank's last forward gathered is still there when it has run out of batches: it gathers nothing.",
        (
            Edit(
                "zero.engine.Engine.join",
                "            self._storage.reset_order()\n            for call",
                "            for call",
            ),
        ),
        (f"{UNITS}[False-counts1-True]",),
    ),
    Mutant(
        "some-ranks-know-what-comes-next",
        ("L14",),
        "After the block ranks fetch ahead what their own forwards taught them: not all the same.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.reset_order",
                "            self.end_iteration()\n        self._order = PrefetchOrder(self._units)\n",
                "            self.end_iteration()\n",
            ),
        ),
        (f"{UNITS}[False-counts0-True]",),
    ),
    Mutant(
        "stage-0-shows-means-inside-join",
        ("L14",),
        "At stage 0 a scaler divides the means that `p.grad` shows, and a rank that has run out of batches steps with "
        "those that are still scaled.",
        (
            Edit(
                "zero.gradients.grad_slots.GradSlots.means_are_shown",
                "return self._means_may_be_shown and not self._joining.active",
                "return self._means_may_be_shown",
            ),
        ),
        ("gradients/test_join.py::test_a_scaler_works_where_a_rank_left[0-False]",),
    ),
    Mutant(
        "a-rate-in-a-tensor-becomes-a-number",
        ("L12",),
        "A rank that takes over a learning rate puts a number where the user has a tensor, which is live no more.",
        (
            Edit(
                "zero.gradients.join.adopt_options",
                "                known.copy_(found)  # the same tensor, which others may hold, too\n",
                "                group[key] = found.item()\n",
            ),
        ),
        ("gradients/test_join.py::test_options_that_a_rank_takes_over_keep_their_type",),
    ),
    Mutant(
        "betas-become-a-list",
        ("L12",),
        "A rank that takes over options has a list where the user has a tuple.",
        (
            Edit(
                "zero.gradients.join._rebuilt",
                "return tuple(_rebuilt(item) for item in items)",
                "return [_rebuilt(item) for item in items]",
            ),
        ),
        ("gradients/test_join.py::test_options_that_a_rank_takes_over_keep_their_type",),
    ),
    Mutant(
        "join-without-finally",
        ("R12",),
        "After an exception inside `join()` the optimizer stays inside, and no other block can be entered.",
        (
            Edit(
                "zero.engine.Engine.join",
                "        finally:\n"
                "            while self._blocks:\n"
                "                self._blocks.pop().__exit__(None, None, None)\n"
                "            try:\n"
                "                self._storage.reset_order()\n"
                "            finally:\n"
                "                self._reducer.end_join()\n",
                "        self._storage.reset_order()\n        self._reducer.end_join()\n",
            ),
        ),
        ("gradients/test_join.py::test_join_ends_with_an_exception",),
    ),
    Mutant(
        "who-left-clears-nothing",
        ("L14",),
        "A rank that has run out of batches does not clear gradients: its slices add up those of all steps.",
        (
            Edit(
                "zero.engine.Engine._follow",
                '            case "exchange":\n                self.exchange(b"")\n',
                '            case "exchange":\n                self.exchange(b"")\n'
                '            case "zero_grad":\n                pass\n',
            ),
        ),
        (f"{LEFT}[2-counts0-None]",),
    ),
    Mutant(
        "who-left-does-not-catch-up",
        ("L14",),
        "A rank that has run out of batches listens without entering the rounds that the others began.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.join.meet",
                "self.agreement.meet(purpose, self._schedule.number, self._empty_round, lambda: data)",
                "self._transport.exchange(data, Tag(Kind.EXCHANGE, purpose))",
            ),
        ),
        (f"{LEFT}[2-counts0-None]",),
    ),
    Mutant(
        "other-arguments-inside-join-are-not-noticed",
        ("L14",),
        "Ranks inside `join` that make one call with different arguments clip by different limits.",
        (
            Edit(
                "zero.gradients.join._check",
                "        if call != expected:\n",
                '        if call["name"] != expected["name"]:\n',
            ),
        ),
        ("gradients/test_join.py::test_ranks_that_call_different_things_are_told_on_every_rank",),
    ),
    Mutant(
        "options-are-not-compared",
        ("L12",),
        "Ranks whose learning rates differ update their slices with different ones, and none notices.",
        (
            Edit(
                "zero.gradients.agreement.check",
                "record.options.get(key, ours) != ours:",
                "record.options.get(key, ours) is None:",
            ),
        ),
        ("gradients/test_join.py::test_options_that_differ_between_ranks_are_an_error_that_names_them",),
    ),
    Mutant(
        "buffers-are-not-broadcast",
        ("L10",),
        "`broadcast_buffers` sends nothing: running statistics stay each rank's own.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage.broadcast_buffers",
                "        self._copy(self._buffers())\n        self._compare",
                "        self._copy([])\n        self._compare",
            ),
        ),
        (f"{CALLS}[2]",),
    ),
)

MUTANTS = (*MASTERS, *SUMS, *CASTS, *SCALING, *JOINING)
