"""Mutants of ranks that hold the same slices, and of units that are kept for their backward."""

from __future__ import annotations

from .mutant import Edit, Mutant

TESTS = "contract/test_sharding_factor.py"
ORDER = "collectives/test_replicas.py"
FOLD = f"{TESTS}::test_a_sum_over_replicas_is_the_fold_in_rank_order"
TRAINING = f"{TESTS}::test_training_is_that_of_the_plain_loop"
KEPT = f"{TESTS}::test_what_is_kept_for_the_backward_changes_no_bit"

REPLICAS = (
    Mutant(
        "one-rank-a-copy-is-never-synchronised",
        ("S10", "P24"),
        "Where every rank holds everything, as under DDP, a rank's own gradient counts as the sum of all.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding.Replicated.__init__",
                "        self.hops: _Hops = (\n",
                "        if width == 1:\n            before = after = None\n        self.hops: _Hops = (\n",
            ),
        ),
        (f"{TRAINING}[2-1-1]",),
    ),
    Mutant(
        "a-sum-does-not-come-home",
        ("S10", "P24"),
        "The last replica alone has the sum of all; the others step with the sum so far.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding._Messages.forth",
                "total = self.onward.irecv(out, self.after, tag)",
                "total = self.onward.irecv(out.clone(), self.after, tag)",
            ),
        ),
        (f"{TRAINING}[2-1-1]",),
    ),
    Mutant(
        "the-mean-is-that-of-one-copy",
        ("P24",),
        "The sum is divided by the number of ranks to a copy, which it is over all ranks.",
        (
            Edit(
                "zero.optimizer.ZeroOptimizer.__init__",
                "self._transport.world_size if divisor is None",
                "self._builder.shards.world_size if divisor is None",
            ),
        ),
        (f"{TESTS}::test_without_a_word_the_sum_is_divided_by_all_ranks",),
    ),
    Mutant(
        "every-replica-adds-the-sum-so-far",
        ("S7",),
        "The sum of earlier backwards is added once for each replica.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding._HybridReduceScatter.__init__",
                "            if start is None:\n                start = algorithm.shards.scratch",
                "            before_all = start\n            if start is not None or start is None:\n"
                "                start = algorithm.shards.scratch",
            ),
            Edit(
                "collectives.algorithms.hybrid_sharding._HybridReduceScatter.__init__",
                "        works.append(algorithm.inner.reduce_scatter(source, bounds, out, start=start, tag=tag))\n",
                "        works.append(algorithm.inner.reduce_scatter(source, bounds, out, start=start, tag=tag))\n"
                "        if hops.before is not None and before_all is not None:\n"
                "            works[1].wait()\n            start.add_(before_all)\n",
            ),
        ),
        (f"{TRAINING}[2-1-1]",),
    ),
    Mutant(
        "a-sum-is-read-before-it-is-here",
        ("S19",),
        "A replica adds onto the memory in which the sum of those before it is still to arrive.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding._HybridReduceScatter.__init__",
                "            works.append(hops.arriving(start, tag))\n        works.append(",
                "            late = hops.arriving(start, tag)\n        works.append(",
            ),
            Edit(
                "collectives.algorithms.hybrid_sharding._HybridReduceScatter.__init__",
                "        hops.onward.post_remaining()\n",
                "        if hops.before is not None:\n            works.append(late)\n"
                "        hops.onward.post_remaining()\n",
            ),
        ),
        (FOLD,),
    ),
    Mutant(
        "the-norm-counts-every-copy",
        ("S28",),
        "Each replica's slices are added to the norm, which is larger by the root of their number.",
        (
            Edit(
                "zero.step.update.Update.norm_part",
                "self._means.slices() if self._is_first_copy else []",
                "self._means.slices()",
            ),
        ),
        (f"{TRAINING}[4-2-2]",),
    ),
    Mutant(
        "a-checkpoint-is-asked-of-the-first-replica",
        ("R8",),
        "States are gathered by the number in the group, not by the place in the copy.",
        (Edit("zero.state.gather.gather", "divmod(to, shards.world_size)", "(0, to % shards.world_size)"),),
        (f"{TESTS}::test_a_checkpoint_does_not_know_how_many_ranks_shared_a_copy[3-1]",),
    ),
    Mutant(
        "a-failure-stays-in-its-replica",
        ("L8",),
        "A rank that fails tells its own replica; the others wait for their time limit.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding.Replicated.__init__",
                "        transport.attach(self.shards, range(first, first + width))\n",
                "        self.first = first\n",
            ),
        ),
        (f"{TESTS}::test_an_algorithm_of_its_own_transport_is_counted_and_fails_with_the_group",),
    ),
    Mutant(
        "sums-go-to-the-other-replicas-one-at-a-time",
        ("L17",),
        "A rank waits for the total of a bucket before it adds to the next one: 128 replicas take 38 s a backward.",
        (Edit("collectives.queue.BucketQueue._land", "pass_on(self._flying[0])", "self._flying[0].wait()"),),
        (f"{ORDER}::test_a_bucket_is_passed_on_before_another_is_launched_and_completed_when_it_is_far_behind",),
    ),
    Mutant(
        "the-last-total-is-awaited-first",
        ("L17",),
        "A rank waits for a total that no other rank sends yet.",
        (
            Edit(
                "collectives.queue.BucketQueue._complete",
                "        self._passed_on[0].wait()\n        self._passed_on.popleft()\n",
                "        self._passed_on[-1].wait()\n        self._passed_on.pop()\n",
            ),
        ),
        (f"{ORDER}::test_a_bucket_is_passed_on_before_another_is_launched_and_completed_when_it_is_far_behind",),
    ),
    Mutant(
        "an-interrupt-loses-the-total",
        ("L3",),
        "A rank that is interrupted when it has sent a sum forgets to receive the total: replicas differ in silence.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding._HybridReduceScatter.pass_on",
                "            with as_a_whole(self._transport, PASSING):\n"
                "                forth, self._forth = self._forth, None\n                self._under_way = forth()\n",
                "            forth, self._forth = self._forth, None\n            self._under_way = forth()\n",
            ),
        ),
        (f"{ORDER}::test_after_an_interrupt_at_any_instruction_all_replicas_have_the_sums_or_all_have_an_error[1]",),
    ),
    Mutant(
        "contributions-stay-until-the-total-is-here",
        ("L7",),
        "A bucket on its way between replicas keeps its contribution: scratch memory grows with the replicas.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator._passed_on",
                "        self._local = self._saved_sum = None\n",
                "        self.touched = True\n",
            ),
        ),
        (f"{TESTS}::test_buckets_on_their_way_between_replicas_take_no_scratch_memory[-2]",),
    ),
    Mutant(
        "replicas-cut-their-buckets-differently",
        ("L17",),
        "A replica on one host lays units side by side in common memory, another, across hosts, does not.",
        (Edit("collectives.topology.replicate.choice", "may_have_common=within)", "may_have_common=True)"),),
        (f"{TESTS}::test_what_is_chosen_follows_from_where_the_ranks_of_a_replica_are[hosts3-2-hierarchical]",),
    ),
)

BACKWARD = (
    Mutant(
        "what-is-kept-is-shown-before-it-was-gathered",
        ("S23",),
        "A unit that ranks nearby share is used in the backward before their parts have arrived.",
        (
            Edit(
                "zero.parameters.gathered.gathers.UnitGathers.start",
                "            return self.post_forward_group.collective.all_gather("
                "target, cuts, tag=_tag(unit, buffer))\n",
                "            self.post_forward_group.collective.all_gather("
                "target, cuts, tag=_tag(unit, buffer))\n"
                "            return Chain(())\n",
            ),
            Edit(
                "zero.parameters.gathered.gathers",
                "from collectives import Choice, Collective, Kind",
                "from collectives import Chain, Choice, Collective, Kind",
            ),
        ),
        (f"{KEPT}[-4-None-2]",),
    ),
    Mutant(
        "what-was-kept-outlives-the-step",
        ("S23",),
        "What ranks nearby kept for a backward that never came is gathered after the step as if it were new.",
        (
            Edit(
                "zero.parameters.gathered.units.GatheredUnits.changed",
                "        buffer.post_forward_shard = None\n        for slot in slots:\n",
                "        for slot in slots:\n",
            ),
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.backward_over",
                "        self.manager.free_post_forward_shards()\n",
                "",
            ),
        ),
        (f"{TESTS}::test_after_an_evaluation_or_a_step_nothing_is_kept[2]",),
    ),
    Mutant(
        "everything-is-kept-for-the-backward",
        ("L7",),
        "Units are released after their backward alone: a rank holds the whole model.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks._has_run",
                "        elif self._keeps_whole:\n",
                "        elif self._keeps_whole or True:\n",
            ),
        ),
        ("parameters/test_units_memory.py::test_at_most_the_root_the_running_unit_and_the_next_one_are_here[3]",),
    ),
    Mutant(
        "nothing-is-kept-for-the-backward",
        ("L17",),
        "Parameters travel twice for each micro-batch, whatever was asked for.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks._has_run",
                "        elif self._keeps_whole:\n",
                "        elif self._keeps_whole and False:\n",
            ),
        ),
        (f"{TESTS}::test_what_is_kept_need_not_travel_again[2-None-False]",),
    ),
)

MUTANTS = (*REPLICAS, *BACKWARD)
