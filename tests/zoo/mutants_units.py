"""Mutants of stage 3: units that are gathered, installed, released and recorded."""

from __future__ import annotations

from .mutant import Edit, Mutant

EXACT = "contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop"
MEMORY, EDITS = "parameters/test_units_memory.py", "parameters/test_stage3_edits.py"

MUTANTS = (
    Mutant(
        "buffers-that-nobody-filled",
        ("S12",),
        "A rank does not put its own slice into the gathered buffer: that part of every weight is what lay there.",
        (
            Edit(
                "zero.parameters.gathered.gathers.UnitGathers.start",
                "        target[low:high].copy_(buffer.shard)\n        return",
                "        assert high - low == buffer.shard.numel()\n        return",
            ),
        ),
        (f"{EXACT}[3-sgd]",),
    ),
    Mutant(
        "weights-are-shown-before-they-arrive",
        ("S23",),
        "A unit's forward begins while its weights are on their way.",
        (
            Edit(
                "zero.parameters.gathered.units.GatheredUnits.wait",
                "            with unit.waiting():\n                while unit.work:\n"
                "                    unit.work[0].wait()\n                    unit.work.pop(0)\n",
                "            unit.under_way, unit.work = list(unit.work), []\n",
            ),
            Edit(
                "zero.parameters.gathered.buffers.GatheredUnit",
                "    work: list[Work] = field(default_factory=list)  # the all-gathers under way\n",
                "    work: list[Work] = field(default_factory=list)  # the all-gathers under way\n"
                "    under_way: list[Work] = field(default_factory=list)\n",
            ),
        ),
        (f"{EXACT}[3-sgd]",),
    ),
    Mutant(
        "the-root-s-rest-is-kept-over-a-step",
        ("S26",),
        "What the last backward had gathered of the root is used again after the step: stale weights.",
        (
            Edit(
                "zero.parameters.unit_manager.UnitManager.reshard_all",
                "            if unit.installed or unit.gathered.state is not State.SHARDED:\n",
                "            if number == 0:\n                self.uninstall(number)\n"
                "            elif unit.installed or unit.gathered.state is not State.SHARDED:\n",
            ),
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.end_iteration",
                "self.manager.all_released()",
                "not any(unit.held for unit in self.manager.units)",
            ),
        ),
        (f"{EXACT}[3-sgd]",),
    ),
    Mutant(
        "a-backward-inside-a-backward-is-let-through",
        ("S26",),
        "Re-entrant checkpointing is not refused: what the inner backward brings is taken for the whole.",
        (Edit("zero.runtime.backward_tracker.reentrant", ") > in_caller\n", ") > 9\n"),),
        ("test_errors.py::test_reentrant_checkpointing_is_refused_with_the_reason[2]",),
    ),
    Mutant(
        "old-graphs-take-new-weights",
        ("L5",),
        "A step does not change what graphs know of a weight: a backward after it uses the new values in silence.",
        (
            Edit(
                "zero.parameters.gathered.units.GatheredUnits.changed",
                "            buffer.versions[slot] += 1\n",
                "            buffer.versions[slot] += 0\n",
            ),
        ),
        ("parameters/test_units.py::test_a_step_between_forward_and_backward_is_an_error_as_in_torch[False-3]",),
    ),
    Mutant(
        "an-old-view-keeps-its-old-values",
        ("L5",),
        "A view that a module kept over a step shows the values before it instead of NaN.",
        (
            Edit(
                "zero.parameters.gathered.units.GatheredUnits.changed",
                '            buffer.externally_held.fill_(float("nan"))\n',
                "            assert buffer.externally_held.numel()\n",
            ),
        ),
        ("parameters/test_units_graphs.py::test_a_view_that_is_kept_over_a_step_shows_no_old_value",),
    ),
    Mutant(
        "a-lent-buffer-is-used-for-another-unit",
        ("L5",),
        "A buffer of which somebody holds a view is taken for free: the view shows a neighbouring unit's weights.",
        (
            Edit(
                "zero.parameters.gathered.units.GatheredUnits._sweep",
                "if buffer.externally_held is not None and holders(buffer.externally_held) == 0:",
                "if buffer.externally_held is not None:",
            ),
            Edit("collectives.pool._Block.free", "return _uses(self.storage) == 1", "return _uses(self.storage) <= 2"),
        ),
        ("parameters/test_units_graphs.py::test_a_view_that_is_kept_within_a_step_follows_its_own_parameter",),
    ),
    Mutant(
        "the-weights-of-another-slot",
        ("L5",),
        "A tensor that a graph saved is restored from the beginning of its bucket, where another parameter lies.",
        (
            Edit(
                "zero.parameters.gathered.saved_tensor_index.SavedTensorIndex.restore",
                "return buffer.whole.as_strided(place.size, place.stride, place.offset)",
                "return buffer.whole.as_strided(place.size, place.stride, buffer.offsets[0])",
            ),
        ),
        (f"{EXACT}[3-sgd]",),
    ),
    Mutant(
        "a-place-is-known-after-its-buffer-went",
        ("L5",),
        "What a unit's buffer held is remembered when another unit has it: a graph takes that weight for this one.",
        (
            Edit(
                "zero.parameters.gathered.saved_tensor_index.SavedTensorIndex.forget",
                "        if self._buffers.pop(buffer.address, None) is not None:\n            self._known.clear()\n",
                "        self._buffers.pop(buffer.address, None)\n",
            ),
        ),
        (
            "parameters/test_units_graphs.py::"
            "test_a_graph_takes_the_weights_of_its_own_unit_also_where_another_lay_there_before",
        ),
    ),
    Mutant(
        "units-stay-after-a-backward",
        ("L7",),
        "What a backward had gathered is kept after it: a rank holds more than the bound says.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.backward_over",
                "        self._reshard_all()\n",
                "",
            ),
        ),
        (f"{MEMORY}::test_after_a_forward_the_graph_holds_no_weights[2]",),
    ),
    Mutant(
        "a-wrong-guess-is-kept",
        ("L7",),
        "A unit that was fetched in advance and then not used stays beside those that are.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks._demand",
                "            for number in (before, expected):\n",
                "            for number in (before,):\n",
            ),
        ),
        ("parameters/test_units_memory.py::test_a_unit_that_was_fetched_in_vain_is_given_back",),
    ),
    Mutant(
        "the-order-of-units-is-never-learned",
        ("L6",),
        "The guess which unit follows is not corrected when a model uses them in another order: no gather overlaps.",
        (
            Edit(
                "zero.parameters.gathered.prefetch_order.PrefetchOrder.forward",
                "        self._forward[position:] = [unit]\n",
                "        self._forward[position:] = self._forward[position:]\n",
            ),
        ),
        (f"{MEMORY}::test_the_next_unit_is_gathered_while_one_runs[Backwards-3]",),
    ),
    Mutant(
        "an-optimizer-keeps-its-arguments",
        ("L7",),
        "The function that chooses units is kept: the object that it belongs to waits for the collector.",
        (
            Edit(
                "zero.setup.build",
                "    streams, joining = Streams(), Joining()\n",
                "    streams, joining = Streams(), Joining()\n    inners.config = config\n",
            ),
        ),
        ("test_lifetimes.py::test_an_optimizer_does_not_keep_the_functions_that_it_was_built_with[3]",),
    ),
    Mutant(
        "graphs-keep-weights",
        ("L7",),
        "Graphs hold the gathered tensors themselves: after a forward all weights are here.",
        (
            Edit(
                "zero.parameters.gathered.saved_tensor_hooks.SavedTensorHooks._hooks.pack",
                "if index is not None and (saved := index.find(tensor)) is not None:",
                "if index is None and (saved := None) is not None:",
            ),
        ),
        (f"{MEMORY}::test_after_a_forward_the_graph_holds_no_weights[2]",),
    ),
    Mutant(
        "edits-of-saved-tensors-go-unseen",
        ("L13",),
        "An activation that was edited in place after the forward is used for the gradient without an error.",
        (
            Edit(
                "zero.parameters.gathered.saved_tensor_hooks.SavedTensorHooks._hooks.unpack",
                "            if tensor._version != version:\n",
                "            if tensor._version < version:\n",
            ),
        ),
        (
            "parameters/test_units.py::test_what_cannot_be_is_one_error_on_every_rank_and_the_step_goes_on[an edit "
            "without gradient of what a unit saved-3]",
        ),
    ),
    Mutant(
        "edits-inside-a-forward-go-unseen",
        ("L13",),
        "A weight that one rank edits through `.data` in a forward is used there and lost, and nobody is told.",
        (
            Edit(
                "zero.parameters.edit_detector.EditDetector.compare",
                "        if same_bits(whole[low:high], buffer.shard):\n",
                "        if whole[low:high].numel() == buffer.shard.numel():\n",
            ),
        ),
        ("parameters/test_stage3_edits.py::test_an_edit_past_the_version_counter_is_told_by_the_owner",),
    ),
    Mutant(
        "edits-in-common-memory-go-unseen",
        ("L13",),
        "Pages of common memory that a rank has written are not compared: an edit is used there and lost in silence.",
        (
            Edit(
                "zero.parameters.resident_units.SharedBucketMemory.edited",
                "yield from ((buffer, piece.slot) for piece in self._differing(buffer, begin, end))",
                "yield from ()",
            ),
        ),
        (f"{EDITS}::test_an_edit_of_what_a_block_does_not_write_is_told_on_every_rank_and_undone",),
    ),
    Mutant(
        "a-part-s-owners-are-one-line-off",
        ("L13",),
        "A unit's part of a bucket is cut 64 bytes beside the bucket's own cuts: what is written there is kept by a "
        "rank that does not own it.",
        (
            Edit(
                "zero.core.layout.BucketSpec.part",
                "cuts=PartOfCuts(self.cuts, begin, end))",
                "cuts=PartOfCuts(self.even_cuts(self.world_size + 1), begin, end))",
            ),
        ),
        ("core/test_layout.py::test_the_middle_of_a_bucket_is_owned_as_the_bucket_is",),
    ),
    Mutant(
        "a-forward-that-raises-stays-entered",
        ("L3",),
        "After an exception in a forward its unit counts as running: it is never dropped again.",
        (
            Edit(
                "zero.parameters.module_hooks.ModuleHooks.__init__",
                "register_forward_hook(self._leaving, always_call=True)",
                "register_forward_hook(self._leaving)",
            ),
        ),
        ("parameters/test_units.py::test_an_exception_in_a_forward_leaves_nothing_gathered",),
    ),
    Mutant(
        "a-released-parameter-answers",
        ("L2",),
        "A parameter outside its unit's forward can be read, and what is read is the NaN behind it.",
        (
            Edit(
                "zero.parameters.released.released_class.answer",
                "        if func in ANSWERABLE:\n",
                "        if func in ANSWERABLE or func is not None:\n",
            ),
        ),
        ("parameters/test_stage3_edits.py::test_gathered_shows_what_was_asked_for_and_nothing_else",),
    ),
    Mutant(
        "what-is-not-listed-is-not-sharded",
        ("L10",),
        "Weights of the module that are not listed keep each rank's own values.",
        (
            Edit(
                "zero.parameters.storage.ParameterStorage._values",
                "        broadcast(self._transport, [whole])\n",
                "        if bucket.spec in self.layout.buckets:\n            broadcast(self._transport, [whole])\n",
            ),
        ),
        ("parameters/test_stage3_edits.py::test_weights_that_are_not_listed_are_rank_0s_too",),
    ),
)
