"""Mutants of what is different on accelerators: where slots start, and a thread of autograd for each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mutant import Edit, Mutant, Wrap

LAYOUT = "core/test_layout.py"
ELEMENTWISE = "step/test_elementwise.py"
THREADS = "gradients/test_two_threads.py"
REPLICAS = "collectives/test_replicas_on_devices.py"
SUM = f"{REPLICAS}::test_every_replica_has_the_sum_in_rank_order_and_no_buffer_is_touched_on_its_way"
ABORT = f"{REPLICAS}::test_collectives_that_may_not_have_ended_are_aborted_with_the_group"
MEMORY = "runtime/test_device_memory.py"


def copying(divide: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: Any, divisor: float) -> None:
        if self.has_sum:
            self._sum().data.clone()
        divide(self, divisor)

    return wrong


def keeping(clear: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: Any) -> None:
        kept = self._whole, self._kept_sum, self._sum_apart
        clear(self)
        self._whole, self._kept_sum, self._sum_apart = kept

    return wrong


def freeing_nothing(_: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: Any) -> None:
        pass

    return wrong


MUTANTS = (
    Mutant(
        "slots-of-a-device-start-on-64-bytes",
        ("L1",),
        "On an accelerator a parameter lies where a plain one never does; its products are summed in another order.",
        (Edit("zero.core.layout.slot_bytes", 'device.partition(":")[0] == "cpu"', "device"),),
        (f"{LAYOUT}::test_slots_start_on_boundaries_of_every_dtype_and_lie_side_by_side",),
    ),
    Mutant(
        "a-second-card-counts-as-a-cpu",
        ("L1",),
        "Only devices without a number are accelerators.",
        (Edit("zero.core.layout.slot_bytes", 'device.partition(":")[0] == "cpu"', 'device == "cpu" or ":" in device'),),
        (f"{LAYOUT}::test_slots_start_on_boundaries_of_every_dtype_and_lie_side_by_side",),
    ),
    Mutant(
        "slots-of-a-device-are-padded-to-64-bytes",
        ("L1",),
        "A bucket of an accelerator is laid out as on the CPU.",
        (
            Edit("zero.core.layout.Dtypes.padded", "self.slot_alignment(device)", "self.alignment"),
            Edit(
                "zero.core.layout.BucketSpec.__post_init__",
                "self.dtypes.slot_alignment(self.device)",
                "self.dtypes.alignment",
            ),
        ),
        (f"{LAYOUT}::test_slots_start_on_boundaries_of_every_dtype_and_lie_side_by_side",),
    ),
    Mutant(
        "only-the-parameters-dtype-is-aligned",
        ("L1",),
        "A slot is on a boundary in the narrow dtype, and not in that of the master weights or the other way round.",
        (Edit("zero.core.layout.Dtypes._narrowest", "return min(", "return max("),),
        (f"{LAYOUT}::test_slots_start_on_boundaries_of_every_dtype_and_lie_side_by_side",),
    ),
    Mutant(
        "no-ragged-length-is-tried-on-a-device",
        ("L12",),
        "A class is tried on lengths for which a device's kernels have one loop, and stepped on others.",
        (Edit("zero.step.trial", "RAGGED_ON_DEVICE = 97", "RAGGED_ON_DEVICE = 96"),),
        ("parameters/test_device_slots.py::test_on_a_device_a_class_is_tried_on_lengths_that_are_no_multiple_of_four",),
    ),
    Mutant(
        "a-low-decay-is-tried-as-it-is",
        ("L12",),
        "Fused Adam on CUDA rounds its decay once in one loop and twice in another; with a low one it hardly shows.",
        (
            Edit(
                "zero.step.trial.ByElement.steps",
                'if self.any_is_low("weight_decay") else ()',
                "if False else ()",
            ),
        ),
        (f"{ELEMENTWISE}::test_a_decay_so_low_that_it_hardly_shows_hides_nothing[1e-07]",),
    ),
    Mutant(
        "raised-decays-are-tried-alone",
        ("L12",),
        "A class that refuses the raised decay is never tried with a raised rate.",
        (Edit("zero.step.trial.Trial.steps", '[("lr",), ()]', '[("lr", "weight_decay"), ()]'),),
        (f"{ELEMENTWISE}::test_a_raised_decay_hides_nothing_either",),
    ),
    Mutant(
        "rates-whose-products-are-exact-are-tried",
        ("L12",),
        "A product with a power of two is exact: however a kernel rounds it, nothing shows.",
        (Edit("zero.step.trial", "RAISED_RATE = 0.3\n", "RAISED_RATE = 0.25\n"),),
        (f"{ELEMENTWISE}::test_a_decay_so_low_that_it_hardly_shows_hides_nothing[1e-07]",),
    ),
    Mutant(
        "a-default-loop-that-cannot-be-sharded-is-a-mystery",
        ("L12",),
        "A class is refused since some of a group's parameters are on the CPU, and the error does not say so.",
        (Edit("zero.step.partition._explaining_loops", "len(devices) > 1", "len(devices) > 2"),),
        (
            "step/test_default_loops.py::test_a_group_on_the_cpu_and_a_gpu_that_is_refused_is_told_to_name_a_loop"
            "[AdamW-, or fused=True]",
        ),
    ),
    Mutant(
        "a-refused-capture-is-invalidated",
        ("L3",),
        "A forward that was refused inside a capture waits for a stream outside it: CUDA ends the user's graph.",
        (Edit("zero.runtime.streams.Streams.end_on_current", "if not self._captures():", "if True:"),),
        ("parameters/test_devices.py::test_a_capture_is_refused_and_training_goes_on[3-forward]",),
    ),
    Mutant(
        "gradients-of-two-devices-arrive-at-once",
        ("L5",),
        "Two threads of autograd launch buckets at the same time: messages interleave.",
        (
            Edit(
                "zero.gradients.hooks._Arrival.__call__",
                "        with owner.lock:\n",
                "        if owner is not None:\n",
            ),
        ),
        (f"{THREADS}::test_no_two_hooks_of_an_optimizer_run_at_once",),
    ),
    Mutant(
        "two-threads-look-for-changes-at-once",
        ("L5",),
        "Two threads of autograd prepare one backward.",
        (
            Edit(
                "zero.gradients.hooks.GradientHooks._watch_ahead.about",
                "                with hooks.lock:\n",
                "                if hooks is not None:\n",
            ),
        ),
        (f"{THREADS}::test_no_two_hooks_of_an_optimizer_run_at_once",),
    ),
    Mutant(
        "a-second-device-is-unscaled-again",
        ("L16",),
        "A GradScaler hands over gradients by device: means are divided by the loss scale once for each.",
        (
            Edit(
                "zero.gradients.owned_means.FoundInf.repeats",
                "        if self._told and not may_be_new and found.device not in self._told:\n",
                "        if False:\n",
            ),
        ),
        (f"{THREADS}::test_a_second_device_of_one_unscale_is_told_the_result_of_the_first",),
    ),
    Mutant(
        "a-second-device-never-hears-of-an-overflow",
        ("L16",),
        "Where one device's gradients overflow, the step of the others is taken.",
        (
            Edit(
                "zero.gradients.owned_means.FoundInf.tell",
                "self._told, self._overflow = {}, overflow",
                "self._told, self._overflow = {}, False",
            ),
        ),
        (f"{THREADS}::test_a_second_device_of_one_unscale_is_told_the_result_of_the_first",),
    ),
    Mutant(
        "units-of-two-devices-are-gathered-in-any-order",
        ("L6",),
        "At stage 3 parameters on two devices are taken: two threads gather units in an order of their own.",
        (
            Edit(
                "zero.core.stage.why_one_device",
                "    if stage.parameters is Placement.SHARD:\n",
                "    if False:\n",
            ),
        ),
        ("parameters/test_devices.py::test_where_units_are_gathered_and_where_states_are_offloaded_it_must_be",),
    ),
    Mutant(
        "a-sum-from-another-device-is-added-before-it-came",
        ("S19", "L17"),
        "A replica adds to memory into which the sum of those before is still on its way.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding._Announced.wait",
                "                self._work = self._begin()\n        self._work.wait()\n",
                "                self._work = self._begin()\n            return\n        self._work.wait()\n",
            ),
        ),
        (f"{SUM}[False-travel0-total0-4-bounds2]",),
    ),
    Mutant(
        "a-sum-from-another-device-has-no-header",
        ("L8",),
        "A replica that is in another bucket sends its sum, which is taken for that of this one.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding._Announced.wait",
                "            self._announced.wait()\n",
                "            self._announced = Chain(())\n",
            ),
        ),
        (f"{REPLICAS}::test_a_replica_in_another_bucket_is_named_before_its_bytes_are_mixed_with_others",),
    ),
    Mutant(
        "the-total-is-that-of-the-first-replica",
        ("S10", "L17"),
        "All replicas step with the contributions of one.",
        (
            Edit(
                "collectives.algorithms.hybrid_sharding._OnDevice.back",
                "owners.world_size - 1 - owners.rank",
                "-owners.rank",
            ),
        ),
        (f"{SUM}[False-travel0-total0-4-bounds2]",),
    ),
    Mutant(
        "what-parts-of-a-group-have-under-way-is-not-aborted",
        ("L8",),
        "After a rank is lost, kernels of its replica's own process group wait for ever.",
        (
            Edit(
                "collectives.backends.gloo.GlooBackend.abort_collectives",
                "sum(part.abort_collectives() for part in self._parts) > 0",
                "False",
            ),
        ),
        (f"{REPLICAS}::test_a_failure_aborts_what_is_under_way_in_the_parts_of_its_group",),
    ),
    Mutant(
        "what-a-stream-waits-for-counts-as-ended",
        ("L8",),
        "A stream waits for a lost rank, the host does not know of it, and the process never ends.",
        (
            Edit(
                "collectives.backends.gloo._UnderWay.__bool__",
                "self._not_awaited > 0 or not all(event.query() for event in self._last.values())",
                "self._not_awaited > 0",
            ),
        ),
        (f"{ABORT}[2-2-False]",),
    ),
    Mutant(
        "a-failure-aborts-nothing",
        ("L8",),
        "Collectives on devices outlive the failure of their group.",
        (
            Edit(
                "collectives.peer_links.PeerLinks.abort",
                "        self._abort_collectives()  # when all reports are out: it may take its time\n",
                "",
            ),
        ),
        (f"{REPLICAS}::test_a_failure_aborts_what_is_under_way_in_the_parts_of_its_group",),
    ),
    Mutant(
        "a-launch-more-for-each-bucket",
        ("L21",),
        "The slice of each bucket is copied once more in a step.",
        (Wrap("zero.runtime.accumulator.GradAccumulator.divide", copying),),
        ("test_launches.py::test_a_step_is_within_its_budget[True-2]",),
    ),
    Mutant(
        "cleared-gradients-keep-their-memory-on-a-device",
        ("L7",),
        "Gradients of the last step take memory while the next forward does.",
        (Wrap("zero.runtime.accumulator.GradAccumulator.clear", keeping),),
        (f"{MEMORY}::test_between_steps_no_gradient_and_no_scratch_takes_memory[2-2]",),
    ),
    Mutant(
        "free-scratch-keeps-its-memory-on-a-device",
        ("L7",),
        "The scratch memory of a backward stays until the next one.",
        (Wrap("collectives.pool.Pool.drop_cheap", freeing_nothing),),
        (f"{MEMORY}::test_between_steps_no_gradient_and_no_scratch_takes_memory[2-2]",),
    ),
    Mutant(
        "a-mean-in-the-place-of-the-sum-is-added-to",
        ("L1",),
        "On one rank a divisor divides the sum in place, and the next backward adds to the mean.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.gather_means",
                "not self._sum_apart and divisor != 1",
                "not self._sum_apart and divisor == 0",
            ),
        ),
        (f"{MEMORY}::test_the_bits_are_those_of_the_plain_loop[None-1-0]",),
    ),
    Mutant(
        "the-first-bucket-is-as-large-as-the-others",
        ("L6",),
        "The reduction of a backward's first bucket begins when a twelfth of the model is done.",
        (
            Edit(
                "zero.core.buckets._buckets",
                "first_bytes if spec.trainable and not begun else bucket_bytes",
                "bucket_bytes",
            ),
        ),
        ("core/test_bucket_size.py::test_the_first_bucket_of_a_backward_is_smaller_and_a_later_group_has_none",),
    ),
)
