"""Mutants of states on disk or on another device."""

from __future__ import annotations

from .mutant import Edit, Mutant

TESTS = "runtime/test_offload.py"
STATES = f"{TESTS}::test_states_on_disk_change_no_bit[-1]"
COPIED = f"{TESTS}::test_states_that_are_copied_to_another_device_for_a_step_and_back[1]"
AHEAD = "runtime/test_staging.py::test_the_next_bucket_is_fetched_and_the_last_goes_back_while_one_is_stepped"
LATE = "runtime/test_staging.py::test_states_that_are_copied_beside_a_step_change_no_bit[adagrad--1]"
RESIDENT = f"{TESTS}::test_two_buckets_at_most_are_resident_and_private_memory_falls_by_the_states"

MUTANTS = (
    Mutant(
        "states-come-home-after-the-first-step-alone",
        ("S2",),
        "States that were stepped on a device are copied back once; later steps begin with those of the first.",
        (
            Edit(
                "zero.runtime.staging.Staging.put_back",
                "                kept[name].copy_(tensor, non_blocking=True)\n",
                "                if name not in vars(self).setdefault('home', set()):\n"
                "                    self.home.add(name)\n"
                "                    kept[name].copy_(tensor, non_blocking=True)\n",
            ),
        ),
        (COPIED,),
    ),
    Mutant(
        "states-never-come-home",
        ("S25",),
        "What was stepped on a device is not there when its host memory is read next.",
        (
            Edit(
                "zero.runtime.staging.Staging.put_back",
                "                kept[name].copy_(tensor, non_blocking=True)\n",
                "                pass\n",
            ),
        ),
        (COPIED,),
    ),
    Mutant(
        "a-copy-back-does-not-wait-for-the-step",
        ("S19", "S25"),
        "What is copied to the host is what the device had before it stepped.",
        (
            Edit(
                "zero.runtime.staging.Staging._beside",
                "        self._stream.wait_stream(torch.accelerator.current_stream(self._device))\n",
                "",
            ),
        ),
        (LATE,),
    ),
    Mutant(
        "a-bucket-is-stepped-before-its-states-have-come",
        ("S19", "S25"),
        "A device steps what was in its memory before, for its states are still on their way.",
        (Edit("zero.runtime.offload.OffloadedStates.ready", "        self._staging.wait()\n", ""),),
        (LATE,),
    ),
    Mutant(
        "an-interrupted-step-leaves-its-states",
        ("S52",),
        "Copies of states that an interrupted step left take the place of those that were loaded since.",
        (
            Edit(
                "zero.step.inner.InnerOptimizer.step",
                "                update.states.release()\n",
                "                pass\n",
            ),
        ),
        ("runtime/test_staging.py::test_what_an_interrupted_step_left_is_no_state_of_the_next[True]",),
    ),
    Mutant(
        "memory-is-used-again-while-it-is-copied",
        ("S25",),
        "The next bucket's states take the memory of those that are still on their way back.",
        (
            Edit(
                "zero.runtime.staging.Staging.let_go",
                "        self.wait()\n        self.tensors = {}\n",
                "        self.tensors = {}\n",
            ),
        ),
        (LATE,),
    ),
    Mutant(
        "copies-of-all-buckets-at-once",
        ("P27",),
        "Copies keep their memory until the step is over: a device must hold all states.",
        (
            Edit(
                "zero.step.inner.InnerOptimizer.step",
                "                        before.release()\n",
                "                        pass\n",
            ),
        ),
        (AHEAD,),
    ),
    Mutant(
        "pages-stay",
        ("P27", "L18"),
        "A bucket that was stepped stays in memory: after a step all states are resident.",
        (
            Edit(
                "zero.runtime.offload.DiskOffload.evict",
                "            region.mapping.madvise(mmap.MADV_DONTNEED, begin, nbytes)\n",
                "",
            ),
        ),
        (f"{RESIDENT}[1-]",),
    ),
    Mutant(
        "states-lie-on-top-of-each-other",
        ("L5", "L18"),
        "Every tensor begins at the same place in the file.",
        (Edit("zero.runtime.offload.DiskOffload.empty", "region.taken, region.taken + nbytes", "region.taken, 0"),),
        (STATES,),
    ),
    Mutant(
        "room-is-not-reserved",
        ("L18",),
        "The file is only made longer: a full disk is a signal in the middle of a step.",
        (
            Edit(
                "zero.runtime.offload.DiskOffload.reserve",
                "            os.posix_fallocate(number, self._end, nbytes)\n",
                "            os.ftruncate(number, self._end + nbytes)\n",
            ),
        ),
        (f"{TESTS}::test_a_full_disk_is_an_error_before_anything_has_changed_on_every_rank",),
    ),
)
