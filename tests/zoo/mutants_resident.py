"""Mutants of stage 3: units that do not travel, in memory that all ranks write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mutant import Edit, Mutant, Wrap

TOLD = "parameters/test_stage3_failures.py"
GRAPHS, MEMORY = "parameters/test_resident_graphs.py", "parameters/test_resident_memory.py"
TRAIN = f"{GRAPHS}::test_units_train_as_in_the_plain_loop"


def without_travel(recall: Callable[..., bool]) -> Callable[..., bool]:
    """Return a recall of parameters in a backward that does not know units that are gathered."""

    def wrong(self: Any, parameter: Any) -> bool:
        gathered = (buffer for unit in self.units for buffer in unit.gathered.buffers)
        return all(known is not parameter for buffer in gathered for known in buffer.parameters) and recall(
            self, parameter
        )

    return wrong


def nothing(_: Any) -> Callable[..., None]:
    return lambda *_: None


MUTANTS = (
    Mutant(
        "a-lone-generation-is-not-told",
        ("L8",),
        "A program in which one rank alone evaluates runs on one host without a word, and fails where units travel.",
        (Wrap("zero.runtime.unit_order.UnitOrder.note", nothing),),
        (
            f"{TOLD}::test_where_no_bytes_of_a_unit_travel_ranks_that_use_other_units_are_told_once_and_train_on[generate]",
        ),
    ),
    Mutant(
        "a-rank-writes-before-all-have-read",
        ("L5",),
        "A block that writes does not wait for the other ranks: a forward that is under way there sees some new "
        "weights.",
        (
            Edit(
                "zero.engine.Engine._overwrite",
                '        self._reducer.check_consistency("gathered(write=True)", self._storage.diagnose())\n',
                "        self._storage.diagnose()\n",
            ),
            Edit(
                "zero.parameters.sharded.ShardedStorage.overwrite",
                "            broadcast(self._transport, flats)\n",
                "            self.manager.commit(buffer, written)\n            broadcast(self._transport, flats)\n",
            ),
        ),
        (f"{MEMORY}::test_nobody_writes_while_another_rank_reads",),
    ),
    Mutant(
        "a-step-returns-before-all-have-written",
        ("L5",),
        "A rank goes on while others write: an array that it kept shows old values, or a mixture.",
        (
            Edit(
                "zero.parameters.resident_units.ResidentUnits.announce",
                'units in common memory"))\n            self.wait_for_writes()\n',
                'units in common memory"))\n',
            ),
        ),
        (f"{MEMORY}::test_a_view_shows_the_new_values_of_all_ranks_as_soon_as_step_returns[on_sockets-2]",),
    ),
    Mutant(
        "an-interrupted-wait-is-forgotten",
        ("L3", "L5"),
        "After an interrupt of the wait for the other ranks' writes a forward begins without it.",
        (
            Edit(
                "zero.parameters.resident_units.ResidentUnits.install",
                "        if self._writing is not None:  # an interrupt has ended `announce`\n"
                "            self.wait_for_writes()\n",
                "        self._writing = None\n",
            ),
        ),
        (f"{MEMORY}::test_an_interrupt_of_the_wait_for_the_others_is_made_up_for",),
    ),
    Mutant(
        "a-class-is-not-flipped",
        ("L2",),
        "A parameter whose memory stays is never released: it can be read and edited at every moment.",
        (
            Edit(
                "zero.parameters.resident_units.ResidentUnits.uninstall",
                "            buffer.set_classes(buffer.released)\n",
                "",
            ),
        ),
        (f"{GRAPHS}::test_inside_a_backward_a_unit_is_released_when_the_next_is_reached[on_sockets-2]",),
    ),
    Mutant(
        "a-version-is-not-raised-on-a-rank",
        ("L5",),
        "Rank 0 alone counts what a step changes: on the others an old graph takes new weights in silence.",
        (
            Edit(
                "zero.parameters.sharded.ShardedStorage.stepping",
                "in self._updated:\n",
                "in self._updated if self._shards.rank == 0 else ():\n",
            ),
        ),
        (f"{GRAPHS}::test_a_step_counts_the_changes_of_all_ranks_on_every_rank[on_sockets-2]",),
    ),
    Mutant(
        "changes-are-counted-after-the-writes",
        ("L3", "L5"),
        "While a step writes, and after an interrupt of it, an old graph takes new weights in silence.",
        (
            Edit("zero.step.update.Update.step", "        self._storage.stepping()\n", ""),
            Edit(
                "zero.step.update.Update.step",
                "        self._storage.stepped()\n",
                "        self._storage.stepping()\n        self._storage.stepped()\n",
            ),
        ),
        (f"{GRAPHS}::test_changes_are_counted_before_the_first_write[on_sockets-2]",),
    ),
    Mutant(
        "pages-are-not-looked-at-when-no-forward-ran",
        ("L5", "L13"),
        "A write through an array on a rank that has run no forward is not found, and hides what others write there.",
        (
            Edit(
                "zero.parameters.resident_units.ResidentUnits.install",
                "            buffer.in_use = True\n",
                "            buffer.in_use = self._ran = True\n",
            ),
            Edit(
                "zero.parameters.resident_units.ResidentUnits.find_edits",
                "        for common in self._common:\n",
                '        ran, self._ran = getattr(self, "_ran", False), False\n'
                "        for common in self._common if ran else ():\n",
            ),
        ),
        (
            "parameters/test_stage3_common.py::"
            "test_what_is_written_into_an_array_after_its_block_is_told_and_undone[no forward-4]",
        ),
    ),
    Mutant(
        "a-private-page-is-kept",
        ("L5", "L13"),
        "After an edit was told, its page stays private to the rank: it never sees there what others write.",
        (
            Edit(
                "zero.parameters.resident_units.SharedBucketMemory.edited",
                "                self._forget(begin, end)\n",
                "",
            ),
        ),
        (
            "parameters/test_stage3_common.py::"
            "test_what_is_written_into_an_array_after_its_block_is_told_and_undone[a forward-4]",
        ),
    ),
    Mutant(
        "an-opaque-unit-is-released",
        ("L3",),
        "A unit whose output hides tensors is released after its forward, and no backward brings it back.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks._watch",
                "            self._opaque.update(self._resident(hooks))\n",
                "",
            ),
        ),
        (f"{GRAPHS}::test_a_unit_whose_output_hides_tensors_stays_until_the_backward_or_the_step_ends[on_sockets-2]",),
    ),
    Mutant(
        "a-backward-in-python-finds-no-unit",
        ("L3",),
        "A loss that a unit kept beside its output leads to a node that saved a parameter, and that is released.",
        (
            Edit(
                "zero.parameters.unit_manager.UnitManager._recall",
                "node, needed = current_autograd_node(), ",
                "node, needed = None, ",
            ),
        ),
        (f"{TRAIN}[losses beside the outputs-on_sockets-2]",),
    ),
    Mutant(
        "a-chunk-that-is-computed-anew-gathers-nothing",
        ("L3",),
        "A checkpoint computes anew what was run inside `gathered`, and the weights of units that travel are released.",
        (Wrap("zero.parameters.unit_manager.UnitManager._recall", without_travel),),
        (
            f"{GRAPHS}::test_a_chunk_of_a_gathered_block_is_computed_anew_after_it_as_in_the_plain_loop"
            "[a weight of the function-on_threads-2]",
        ),
    ),
    Mutant(
        "an-edited-view-leads-to-no-unit",
        ("L3",),
        "Only the nodes of a unit's outputs tell of a backward: one whose output is a view that is edited is released.",
        (
            Edit("zero.parameters.module_hooks.ModuleHooks.watch", "(*tensors, *bases)", "tensors"),
            Edit(
                "zero.parameters.unit_manager.UnitManager._recall",
                "node, needed = current_autograd_node(), ",
                "node, needed = None, ",
            ),
        ),
        (f"{TRAIN}[views that are edited in place-on_sockets-2]",),
    ),
)
