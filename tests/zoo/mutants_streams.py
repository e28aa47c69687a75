"""Mutants of the order among an optimizer's streams."""

from __future__ import annotations

from .mutant import Edit, Mutant

TESTS = "runtime/test_streams_are_ordered.py"
PARTS = f"{TESTS}::test_parts_of_a_step_are_ordered_on_whatever_streams_they_are"
WAIT = "        self._streams.wait_for_previous()\n"

MUTANTS = (
    Mutant(
        "a-backward-reads-means-that-are-on-their-way",
        ("S20",),
        "A second backward looks for edits of the means while another stream still writes them.",
        (Edit("zero.gradients.reducer.Reducer.backward_is_near", WAIT, ""),),
        (f"{PARTS}[each part-2-0]",),
    ),
    Mutant(
        "gradients-of-two-towers-are-put-together-too-early",
        ("S19", "S20"),
        "The last gradient of a bucket is there, others are still computed on another stream.",
        (Edit("zero.gradients.reducer.Reducer.gradient_ready", f"    {WAIT}", "            pass\n"),),
        (f"{PARTS}[two towers-2-2]",),
    ),
    Mutant(
        "the-end-of-a-backward-has-no-stream",
        ("S19",),
        "What the end of a backward enqueues on its caller's stream is not waited for by a clip on another.",
        (Edit("zero.gradients.reducer.Reducer.backward_ended", WAIT, ""),),
        (f"{PARTS}[each part-2-0]",),
    ),
    Mutant(
        "an-agreement-has-no-stream",
        ("S20",),
        "A `GradScaler` unscales gradients that another stream is still to write.",
        (Edit("zero.gradients.reducer.Reducer.check_consistency", WAIT, ""),),
        (f"{TESTS}::test_so_are_gradients_that_a_scaler_unscales[2]",),
    ),
    Mutant(
        "a-local-call-has-no-stream",
        ("S20",),
        "An average takes weights that a step on another stream is still to write.",
        (Edit("zero.engine.Engine.check_usable", "        self.parts.streams.wait_for_previous()\n", ""),),
        (f"{TESTS}::test_whole_tensors_are_read_and_written_in_order[1-0]",),
    ),
    Mutant(
        "a-unit-is-gathered-before-it-was-stepped",
        ("S20", "S23"),
        "A forward on another stream than the step's sends slices that are still to be updated.",
        (Edit("zero.parameters.unit_hooks.UnitHooks._begin", WAIT, ""),),
        (f"{PARTS}[each part-2-3]",),
    ),
    Mutant(
        "a-unit-s-memory-is-gathered-into-while-it-is-read",
        ("S18", "L5"),
        "The next forward, on the stream of this one's last unit, overwrites a parameter that the model still reads.",
        (Edit("zero.parameters.unit_hooks.UnitHooks.left", "        self._streams.end_on_current()\n", ""),),
        (f"{TESTS}::test_a_units_memory_is_not_used_again_before_its_last_reader_whatever_unit_ran_between",),
    ),
    Mutant(
        "a-block-s-memory-is-gathered-into-while-it-is-read",
        ("S18", "L5"),
        "Parameters that a block of `gathered` read on another stream are overwritten by the next gather.",
        (Edit("zero.parameters.sharded.ShardedStorage._gathered", ", self._streams.block():\n", ":\n"),),
        (f"{TESTS}::test_a_block_of_gathered_parameters_that_ends_on_another_stream_is_left_when_they_were_read",),
    ),
    Mutant(
        "weights-come-back-while-the-average-computes",
        ("S20",),
        "A model that computes with an average gets its own weights back in the midst of a forward.",
        (Edit("zero.engine.Engine.apply_average", ", self.parts.streams.block():\n", ":\n"),),
        (f"{TESTS}::test_weights_come_back_in_order_when_the_block_of_an_average_ends_on_another_stream[1-3]",),
    ),
    Mutant(
        "a-rank-without-batches-steps-before-its-last-step",
        ("S20",),
        "What a rank does for the others at the end of `join` begins while its own last step is under way.",
        (
            Edit(
                "zero.engine.Engine.join",
                "            with self.parts.streams.block():\n                yield\n",
                "            yield\n",
            ),
        ),
        (f"{TESTS}::test_a_rank_without_batches_follows_in_order_on_the_stream_on_which_join_ends[1]",),
    ),
    Mutant(
        "a-tower-s-gradients-are-overwritten-while-they-are-copied",
        ("S18", "L5"),
        "The next node of a tower writes into the memory of a gradient that another stream still copies.",
        (
            Edit(
                "zero.runtime.accumulator.GradAccumulator.flush",
                "        self._streams.keep_memory(arrived.values())\n",
                "",
            ),
        ),
        (f"{PARTS}[two towers-1-1]",),
    ),
    Mutant(
        "a-dropped-block-is-still-in-use",
        ("S18", "L5"),
        "A block that the pool drops goes to a stream that does not wait for its last user.",
        (
            Edit(
                "collectives.pool.Pool._drop", "                whole.record_stream(stream)\n", "                pass\n"
            ),
        ),
        (f"{PARTS}[each part-2-0]",),
    ),
    Mutant(
        "the-stream-before-waits-for-this-one",
        ("S19",),
        "The wait has the wrong direction: what was enqueued before is held up, and what comes now is not.",
        (
            Edit(
                "zero.runtime.streams.Streams._follow",
                "                current.wait_stream(last)\n",
                "                last.wait_stream(current)\n",
            ),
        ),
        (f"{PARTS}[side stream-2-1]",),
    ),
    Mutant(
        "copies-begin-in-memory-that-is-in-use",
        ("S18", "S25"),
        "States are copied to a device into memory that its last user has not left.",
        (
            Edit(
                "zero.runtime.staging.Staging.fetch",
                "        with self._beside():\n",
                "        with nullcontext() if self._stream is None or not kept else self._stream:\n",
            ),
            Edit(
                "zero.runtime.staging",
                "from contextlib import contextmanager\n",
                "from contextlib import contextmanager, nullcontext\n",
            ),
        ),
        (f"{TESTS}::test_copies_of_offloaded_states_are_ordered[1-1]",),
    ),
)
