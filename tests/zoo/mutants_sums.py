"""Mutants of sums of gradients: accumulation, the order of the sum, division, missing or cleared gradients."""

from __future__ import annotations

from .mutant import Edit, Mutant

NO_SYNC = "contract/test_exact.py::test_no_sync_changes_when_bytes_travel_never_what_they_sum_to"
CLEARED = "contract/test_exact.py::test_every_way_to_clear_a_gradient_works_after_steps_and_skipped_steps"
FEWER = "contract/test_exact.py::test_ranks_that_have_fewer_micro_batches_contribute_nothing"

MUTANTS = (
    Mutant(
        "every-backward-resets-the-sum",
        ("S1",),
        "Each reduction begins anew, so that of several backwards only the last one counts.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._launch",
                "start = None if before is None else before.data",
                "start = None",
            ),
        ),
        (f"{NO_SYNC}[2]",),
    ),
    Mutant(
        "missing-gradients-send-what-lies-in-the-buffer",
        ("S3",),
        "A parameter without a gradient in this micro-batch contributes what the buffer held before.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._launch",
                "        if not self._prefilled:\n            for slot in self._unwritten:\n"
                "                self._view(slot).fill_(-0.0)\n        if self._local.data.dtype",
                "        if self._local.data.dtype",
            ),
            Edit(
                "zero.runtime.accumulator.GradAccumulator._cat_list",
                "        return row if self._contiguous else None\n",
                "        return row if self._contiguous and len(arrived) == len(self.bucket.slots) else None\n",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[1-sgd]",),
    ),
    Mutant(
        "what-no-sync-left-is-not-reduced",
        ("S4",),
        "The micro-batches after the last synchronised backward never leave their rank.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.finalize_grads",
                "        if pending:\n",
                "        if pending and not any(bucket.grad.has_sum for bucket in self._buckets):\n",
            ),
        ),
        (f"{NO_SYNC}[2]",),
    ),
    Mutant(
        "zero-grad-keeps-the-sum",
        ("S5",),
        "`zero_grad()` clears what is shown, not the running sum: gradients of all steps add up.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.clear",
                '''is not the same as a zero gradient."""\n        self.has_sum = False\n''',
                '''is not the same as a zero gradient."""\n''',
            ),
        ),
        (f"{CLEARED}[2-zero_grad]",),
    ),
    Mutant(
        "stage-0-accumulates-onto-the-mean",
        ("S6",),
        "Stage 0 alone adds a second backward to the divided mean instead of to the sum.",
        (
            Edit(
                "zero.core.stage.Stage.sum_lies_apart",
                "return not self.keeps_full_grads or (self.grads_replicated and not is_mean) or dtypes.widens",
                "return not self.keeps_full_grads or dtypes.widens",
            ),
            Edit(
                "zero.runtime.accumulator.GradAccumulator.gather_means",
                "not self._sum_apart and divisor != 1",
                "not self._sum_apart and divisor == 0",
            ),
        ),
        ("gradients/test_gradients.py::test_stage_0_shows_the_mean_gradient_after_each_backward",),
    ),
    Mutant(
        "the-sum-is-divided-at-each-reduction",
        ("S7",),
        "What was accumulated is divided by the ranks at every backward: 1/W compounds.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._reduced",
                '''the reduction of the contribution is complete."""\n        self.has_sum = True\n''',
                '''the reduction of the contribution is complete."""\n        self.has_sum = True\n'''
                "        self._sum().data.div_(self.bucket.world_size)\n",
            ),
        ),
        (f"{NO_SYNC}[2]",),
    ),
    Mutant(
        "one-rank-adds-each-gradient-twice",
        ("S8",),
        "With one rank the running sum is the buffer that the next gradient fills: each one counts twice.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._to_travel",
                "if self._shards.world_size == 1 and not self.has_sum and not",
                "if self._shards.world_size == 1 and not",
            ),
        ),
        (f"{NO_SYNC}[2]",),
    ),
    Mutant(
        "no-sync-overwrites",
        ("S9",),
        "Under `no_sync` a new gradient replaces the one before it instead of being added.",
        (Edit("zero.runtime.accumulator.GradAccumulator.flush", "foreach_add_(", "foreach_copy_("),),
        (f"{NO_SYNC}[2]",),
    ),
    Mutant(
        "a-mean-that-is-a-sum",
        ("S11",),
        "Gradients are summed over the ranks and not divided: W times too large.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.divide",
                "            self._sum().data.div_(divisor)\n",
                "            pass\n",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[2-sgd]",),
    ),
    Mutant(
        "division-by-a-reciprocal",
        ("L1",),
        "The sum is multiplied by 1/D, which rounds twice: some elements are a bit off.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.divide",
                "self._sum().data.div_(divisor)",
                "self._sum().data.mul_(1 / divisor)",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[2-sgd]",),
    ),
    Mutant(
        "reductions-stay-local",
        ("S13",),
        "The owner adds up its own contribution alone: gradients of the other ranks never arrive.",
        (
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "                parts.append((source[low:high] if rank == t.rank else arriving[rank])[begin:end])\n",
                "                if rank == t.rank:\n"
                "                    parts.append(source[low + begin : low + end])\n",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[2-sgd]",),
    ),
    Mutant(
        "own-contribution-first",
        ("S21",),
        "The owner adds its own contribution first: the order of the sum follows from who owns a slice, and so "
        "the bits "
        "from the bucket size.",
        (
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "                parts.append((source[low:high] if rank == t.rank else arriving[rank])[begin:end])\n",
                "                part = (source[low:high] if rank == t.rank else arriving[rank])[begin:end]\n"
                "                parts.insert((start is not None) if rank == t.rank else len(parts), part)\n",
            ),
        ),
        ("contract/test_exact.py::test_the_number_of_ranks_and_the_bucket_size_do_not_matter[2-3-0.0005]",),
    ),
    Mutant(
        "the-sum-so-far-last",
        ("L1",),
        "What came before is added last: (x0 + x1) + sum instead of (sum + x0) + x1, another order than the "
        "plain loop's.",
        (
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "parts = [] if start is None else [start[begin:end]]",
                "parts = []",
            ),
            Edit(
                "collectives.algorithms.pairwise.Pairwise.reduce_scatter",
                "            pieces.append(",
                "            parts += [] if start is None else [start[begin:end]]\n            pieces.append(",
            ),
        ),
        ("contract/test_exact.py::test_the_number_of_ranks_and_the_bucket_size_do_not_matter[2-3-0.0005]",),
    ),
    Mutant(
        "positive-zero-for-nothing",
        ("L1",),
        "A missing gradient contributes +0.0, which turns a sum of -0.0 into 0.0.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._launch",
                "for slot in self._unwritten:\n                self._view(slot).fill_(-0.0)",
                "for slot in self._unwritten:\n                self._view(slot).fill_(0.0)",
            ),
        ),
        ("gradients/test_gradients.py::test_a_missing_gradient_leaves_a_negative_zero",),
    ),
    Mutant(
        "a-cleared-gradient-comes-back",
        ("S5",),
        "A gradient that no_sync left and the user cleared stays in the contribution, where the next backward does not "
        "reach it.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.clear_slot",
                "            self._view(slot).fill_(-0.0)\n            self._unwritten.add(slot)\n",
                "            self._unwritten.add(slot)\n",
            ),
        ),
        ("gradients/test_gradients.py::test_what_no_sync_left_and_was_cleared_does_not_come_back[1-1]",),
    ),
    Mutant(
        "positive-zero-between-those-that-came",
        ("L1",),
        "A missing gradient is +0.0 where those of its bucket that came are put together in one call.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._nothing",
                "nothing = torch.full((1,), -0.0,",
                "nothing = torch.full((1,), 0.0,",
            ),
        ),
        ("gradients/test_gradients.py::test_a_missing_gradient_leaves_a_negative_zero[1.0-1]",),
    ),
    Mutant(
        "padding-before-its-gradient",
        ("S17",),
        "Of a contribution that is put together in one call, a slot's padding lies before it: gradients are shifted.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._nothing",
                "            places.append(len(row))\n            row.append(nothing.expand(slot.numel))\n"
                "            if end > slot.end:\n"
                "                row.append(torch.zeros(end - slot.end, dtype=dtype, device=device))\n",
                "            if end > slot.end:\n"
                "                row.append(torch.zeros(end - slot.end, dtype=dtype, device=device))\n"
                "            places.append(len(row))\n            row.append(nothing.expand(slot.numel))\n",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[1-sgd]",),
    ),
    Mutant(
        "narrow-sums",
        ("S37",),
        "Contributions that travel in bf16 are summed in bf16, not in the accumulator's dtype.",
        (
            Edit(
                "collectives.algorithms.ordered_sum.ordered_sum",
                "    running = torch.empty(",
                "    if parts[-1].dtype != out.dtype:\n"
                "        out.copy_(sum(part.to(parts[-1].dtype) for part in parts))\n        return\n"
                "    running = torch.empty(",
            ),
        ),
        ("collectives/test_collectives.py::test_pairwise_adds_narrow_contributions_in_the_wide_accumulator",),
    ),
    Mutant(
        "each-rank-has-its-own-idea-of-what-was-used",
        ("S15",),
        "Ranks do not agree which parameters have a gradient: the shards of one parameter are updated on some "
        "ranks only.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.finalize_grads",
                "        used = [record.used for record in records]\n",
                "        used = [records[self._transport.rank].used]\n",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[2-sgd]",),
    ),
    Mutant(
        "each-rank-divides-by-its-own-count",
        ("S16",),
        "Ranks with different token counts divide by their own: the mean is that of no objective.",
        (Edit("zero.gradients.agreement.check", "if record.divisor != first.divisor:", "if first.divisor is None:"),),
        ("test_errors.py::test_a_divisor_that_differs_between_ranks[2]",),
    ),
    Mutant(
        "clip-and-step-both-divide",
        ("S36",),
        "Clip and step both prepare the gradients: after a clip they are divided by the divisor a second time.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.finalize_grads",
                "            self._schedule.agree_used(used)\n            self._slots",
                "            self._schedule.agree_used(used)\n            for bucket in self._buckets:\n"
                "                if not self._stage.grads_replicated and purpose == 'step()':\n"
                "                    bucket.grad.divide(self.divisor)\n            self._slots",
            ),
        ),
        ("contract/test_exact.py::test_clipping_is_that_of_the_plain_loop_for_every_norm[2-2.0]",),
    ),
    Mutant(
        "hooks-hand-over-the-weights",
        ("R11",),
        "The hook takes what it is called with, the parameter, for the gradient: weights are averaged.",
        (
            Edit(
                "zero.gradients.hooks._Arrival.__call__",
                "self._slot, gradient.detach() if gradient.requires_grad else gradient)",
                "self._slot, parameter.detach())",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[2-sgd]",),
    ),
    Mutant(
        "no-sync-without-finally",
        ("R12",),
        "After an exception inside `no_sync()` no backward is reduced any more.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.no_sync",
                "        try:\n            yield\n        finally:\n            self._sync = before\n",
                "        yield\n        self._sync = before\n",
            ),
        ),
        ("test_errors.py::test_no_sync_ends_with_an_exception",),
    ),
    Mutant(
        "autograd-adds-to-the-mean",
        ("L2",),
        "At stage 0 the mean stays in `p.grad` during a backward: autograd adds to it, and the sum counts it again.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.backward_is_near",
                "        if self.means_are_shown:\n            self._slots.withdraw()\n",
                "",
            ),
        ),
        ("gradients/test_gradients.py::test_stage_0_shows_the_mean_gradient_after_each_backward",),
    ),
    Mutant(
        "an-interrupted-backward-is-forgotten",
        ("L3",),
        "The buckets of a backward that raised on one rank are not launched: the other ranks wait for them in vain.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.finish_interrupted",
                "        self._complete()\n        self._slots.forget(cleared)\n",
                "        self._schedule.abandon()\n        self._slots.forget(cleared)\n",
            ),
        ),
        ("test_errors.py::test_an_exception_inside_a_backward_leaves_everything_usable[failing1-2]",),
    ),
    Mutant(
        "the-full-gradient-is-a-sum",
        ("L2",),
        "`full_grad` before a clip shows the undivided sum.",
        (
            Edit(
                "zero.gradients.reducer.Reducer.full_gradient",
                "            if self._schedule.is_open:\n                whole.div_(self.divisor)\n",
                "",
            ),
        ),
        ("gradients/test_gradients.py::test_full_grad_is_the_plain_mean_before_and_after_clipping[2]",),
    ),
    Mutant(
        "who-is-trainable-is-asked-once",
        ("L4",),
        "A parameter that is unfrozen later is not counted, and its bucket leaves before its gradient comes.",
        (
            Edit(
                "zero.gradients.grad_slots.GradSlots._read",
                "[parameter.requires_grad for parameter in bucket.parameters]",
                "[spec.trainable for spec in bucket.specs]",
            ),
        ),
        ("gradients/test_gradients.py::test_a_parameter_that_is_unfrozen_later_is_trained_from_then_on[2]",),
    ),
)
