"""Mutants of saving, loading and editing: states, groups, names, weights written by the user."""

from __future__ import annotations

from typing import Any

import torch

from .mutant import Edit, Mutant, Wrap

RESUME = "state/test_saving.py::test_training_goes_on_from_a_saved_dict_as_if_it_had_not_stopped"
OLDER = "state/test_saving.py::test_a_dict_of_an_older_version_is_loaded_as_its_class_loads_it"


def completing_counts_by_hand(completed: Any) -> Any:
    def by_hand(state_dict: Any, *others: Any) -> Any:
        found = completed(state_dict, *others)
        for index, state in found["state"].items():
            if type(state_dict["state"][index].get("step")) is int:
                state["step"] = torch.tensor(state_dict["state"][index]["step"])
        return found

    return by_hand


def checking_nothing(_: Any) -> Any:
    return lambda *_: None


MUTANTS = (
    Mutant(
        "the-loader-s-loop-is-empty",
        ("S52",),
        "Loading visits no piece: training goes on from an empty optimizer.",
        (
            Edit(
                "zero.state.plain_dicts.scatter",
                "        for number, piece in enumerate(states.pieces):\n            slot, spec",
                "        for number, piece in enumerate(states.pieces[:0]):\n            slot, spec",
            ),
        ),
        (f"{RESUME}[2-3]",),
    ),
    Mutant(
        "step-counts-are-not-loaded",
        ("S53",),
        "The step count starts at 0 after a load: Adam's bias correction is that of a first step.",
        (
            Edit(
                "zero.state.plain_dicts.scalar_state",
                "        return copy.deepcopy(value)\n",
                "        return copy.deepcopy(value)\n    value = torch.zeros_like(value)\n",
            ),
        ),
        (f"{RESUME}[2-3]",),
    ),
    Mutant(
        "group-options-are-not-loaded",
        ("S53",),
        "What param groups hold, the learning rate of a schedule say, is not taken from the saved dict.",
        (Edit("zero.state.plain_dicts.PlainDicts.load", "            group.update(copy.deepcopy(options))\n", ""),),
        (f"{RESUME}[2-3]",),
    ),
    Mutant(
        "loaded-weights-do-not-reach-the-shard",
        ("S54",),
        "At stage 3 what is loaded inside `gathered(write=True)` stays in the gathered copy: the next step starts from "
        "the values before.",
        (
            Edit(
                "zero.parameters.gathered.units.GatheredUnits.commit",
                "            if piece.slot in slots:\n                buffer.shard",
                "            if piece.slot in slots and not buffer.updated:\n                buffer.shard",
            ),
        ),
        ("parameters/test_stage3_edits.py::test_an_assigned_state_dict_is_rank_0s_on_every_rank",),
    ),
    Mutant(
        "frozen-weights-are-lost",
        ("S55",),
        "Only what is trained is given back when the model is made plain: frozen weights are gone.",
        (
            Edit(
                "zero.parameters.sharded.ShardedStorage.release",
                "        self._take_out(list(self.manager.buffers()))\n",
                "        trained = [s for s in self.manager.buffers() if any(p.requires_grad for p in "
                "s.parameters)]\n"
                "        self._take_out(trained)\n",
            ),
        ),
        ("contract/test_exact.py::test_every_class_and_path_gives_the_bits_of_the_plain_loop[3-sgd]",),
    ),
    Mutant(
        "a-parameter-is-known-by-its-address",
        ("S56",),
        "Parameters are told apart by their address, which is 0 for all that have no elements.",
        (
            Edit(
                "zero.core.parameter_specs.specs",
                "        names.setdefault(id(binding.parameter), []).append(binding.name)\n"
                "        order.setdefault(id(binding.parameter), len(order))\n",
                "        names.setdefault(binding.parameter.data_ptr(), []).append(binding.name)\n"
                "        order.setdefault(id(binding.parameter), len(order))\n",
            ),
            Edit(
                "zero.core.parameter_specs.specs",
                "names.get(id(parameter)) or ([name]",
                "names.get(parameter.data_ptr()) or ([name]",
            ),
        ),
        ("state/test_saving.py::test_states_of_parameters_without_elements_are_told_apart",),
    ),
    Mutant(
        "moments-are-dropped",
        ("S57",),
        "The loader makes room for the moments and leaves them zero.",
        (
            Edit(
                "zero.state.plain_dicts.scatter",
                "                target.piece(piece).copy_(source)\n",
                "                assert target.data.numel() >= source.numel()\n",
            ),
        ),
        (f"{RESUME}[2-3]",),
    ),
    Mutant(
        "offsets-as-if-ranks-divided-evenly",
        ("S58",),
        "The loader rounds a piece's offset to a multiple of the number of ranks: right on two ranks, wrong on three.",
        (
            Edit(
                "zero.state.plain_dicts.scatter",
                "                source = flat_values[key][piece.begin - slot.offset : piece.end - slot.offset]\n",
                "                ranks = bucket.spec.world_size\n"
                "                begin = (piece.begin - slot.offset) // ranks * ranks\n"
                "                source = flat_values[key][begin : begin + piece.numel]\n",
            ),
        ),
        (f"{RESUME}[2-3]",),
    ),
    Mutant(
        "padding-is-saved",
        ("S60",),
        "A saved state runs to the end of its padding instead of the end of its parameter.",
        (
            Edit(
                "zero.state.gather.gather",
                "                    values[name] = strided(flats[name], slot.offset, of.shape, of.stride).clone()\n",
                "                    end = next((s.offset for s in spec.slots if s.offset > slot.offset), "
                "spec.numel)\n"
                "                    values[name] = flats[name][slot.offset : end].clone()\n",
            ),
        ),
        ("state/test_saving.py::test_a_saved_dict_has_torchs_own_form_and_names",),
    ),
    Mutant(
        "names-are-not-compared",
        ("S61",),
        "A saved dict whose parameters have other names is loaded by position, into other layers.",
        (
            Edit(
                "zero.state.plain_dicts.check",
                "if known and saved and known[position] != saved[position]:",
                "if known and saved and len(known) != len(saved):",
            ),
        ),
        ("test_errors.py::test_a_state_dict_of_another_model_changes_nothing",),
    ),
    Mutant(
        "old-states-beside-new-groups",
        ("S62",),
        "After a further step `state_dict()` pairs states that were consolidated before it with the groups of now.",
        (
            Edit(
                "zero.engine.Engine._agree_and_update",
                "        self._reducer.stepped()\n        self.dicts.forget()\n",
                "        self._reducer.stepped()\n",
            ),
        ),
        ("test_errors.py::test_state_dict_of_a_shard_says_what_to_call",),
    ),
    Mutant(
        "the-last-key-of-a-state-is-saved",
        ("R9",),
        "Only the last tensor of a state is made whole for the saved dict.",
        (
            Edit(
                "zero.state.gather.gather",
                "                    for name in slots[number].elementwise:\n",
                "                    for name in slots[number].elementwise[-1:]:\n",
            ),
        ),
        ("state/test_saving.py::test_a_saved_dict_has_torchs_own_form_and_names",),
    ),
    Mutant(
        "states-are-keyed-by-id",
        ("R13",),
        "Saved states are keyed by the address of an object, which no other process shares.",
        (
            Edit(
                "zero.state.gather.gather",
                "                result[of.index] = values\n",
                "                result[id(of)] = values\n",
            ),
        ),
        ("state/test_saving.py::test_a_saved_dict_has_torchs_own_form_and_names",),
    ),
    Mutant(
        "a-replaced-parameter-is-not-noticed",
        ("L13",),
        "A parameter of the module that was replaced is trained no more, and nobody says so.",
        (
            Edit(
                "zero.core.parameter_specs.replaced",
                "if binding.registry.get(binding.key) is not binding.parameter)",
                "if binding.key not in binding.registry)",
            ),
        ),
        ("test_errors.py::test_a_module_whose_parameters_were_replaced_moved_or_cast[rank 1 alone-replace_weight-2]",),
    ),
    Mutant(
        "counts-of-older-versions-are-made-by-hand",
        ("S53", "L12"),
        "The step count of an older version's dict gets another dtype than its class gives it.",
        (Wrap("zero.state.older.completed", completing_counts_by_hand),),
        (f"{OLDER}[Adam-3-all at once]",),
    ),
    Mutant(
        "a-class-completes-the-dicts-of-others",
        ("S61", "L12"),
        "What a dict of another class lacks is filled in, and training goes on from its states.",
        (Wrap("zero.state.older._check_options", checking_nothing),),
        ("state/test_saving.py::test_a_dict_that_no_version_of_the_class_has_saved_changes_nothing[unknown]",),
    ),
)
