"""Mutants of what is different on accelerators: where slots start, and a thread of autograd for each device."""

from __future__ import annotations

from .mutant import Edit, Mutant

LAYOUT = "core/test_layout.py"
THREADS = "gradients/test_two_threads.py"

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
                "        if self._told and found.device not in self._told:\n",
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
)
