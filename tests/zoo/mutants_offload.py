"""States, and parameters, that are kept on disk or on another device."""

from __future__ import annotations

from .mutant import Edit, Mutant

OFFLOAD, RUNS, SHARDED = "zero/offload.py", "zero/runs.py", "zero/sharded.py"
TESTS = "test_offload.py"
STATES = f"{TESTS}::test_states_on_disk_change_no_bit[-1]"
COPIED = f"{TESTS}::test_states_that_are_copied_to_another_device_for_a_step_and_back[1]"
RESIDENT = f"{TESTS}::test_two_buckets_at_most_are_resident_and_private_memory_falls_by_the_states"

MUTANTS = (
    Mutant(
        "states-come-home-after-the-first-step-alone",
        ("S2",),
        "States that were stepped on a device are copied back once; later steps begin with those of the first.",
        (
            Edit(
                RUNS,
                "        for name, staged in self._staged.items():\n            self.flat[name].copy_(staged",
                "        for name, staged in self._staged.items():\n"
                "            if name in vars(self).setdefault('home', set()):\n                continue\n"
                "            self.home.add(name)\n            self.flat[name].copy_(staged",
            ),
        ),
        (COPIED,),
    ),
    Mutant(
        "states-never-come-home",
        ("S25",),
        "What was stepped on a device is not there when its host memory is read next.",
        (Edit(RUNS, "            self.flat[name].copy_(staged, non_blocking=True)\n", "            pass\n"),),
        (COPIED,),
    ),
    Mutant(
        "pages-stay",
        ("P27", "L18"),
        "A bucket that was stepped stays in memory: after a step all states are resident.",
        (Edit(OFFLOAD, "            region.mapping.madvise(mmap.MADV_DONTNEED, begin, nbytes)\n", ""),),
        (f"{RESIDENT}[1--False]",),
    ),
    Mutant(
        "slices-on-disk-stay-in-memory",
        ("P27", "L18"),
        "Slices of parameters that a step has written stay until the next forward.",
        (
            Edit(
                SHARDED,
                "        if self._keeper is not None:\n            self._keeper.leave([self.flats[bucket]])\n",
                "        return\n",
            ),
        ),
        (f"{RESIDENT}[3--True]",),
    ),
    Mutant(
        "states-lie-on-top-of-each-other",
        ("L5", "L18"),
        "Every tensor begins at the same place in the file.",
        (Edit(OFFLOAD, "region.taken, region.taken + nbytes", "region.taken, 0"),),
        (STATES,),
    ),
    Mutant(
        "room-is-not-reserved",
        ("L18",),
        "The file is only made longer: a full disk is a signal in the middle of a step.",
        (
            Edit(
                OFFLOAD,
                "            os.posix_fallocate(number, self._end, nbytes)\n",
                "            os.ftruncate(number, self._end + nbytes)\n",
            ),
        ),
        (f"{TESTS}::test_a_full_disk_is_an_error_before_anything_has_changed_on_every_rank",),
    ),
)
