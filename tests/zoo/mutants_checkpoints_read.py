"""Mutants of restoring: at another topology or precision, values and options, random streams, and the data."""

from __future__ import annotations

from typing import Any

from .mutant import Edit, Mutant, Wrap

RESTORED, TOPOLOGY = "checkpoint/test_restored.py", "checkpoint/test_topology.py"
GOES_ON = f"{TOPOLOGY}::test_every_class_and_precision_has_one_content_and_goes_on"
PRECISION = f"{TOPOLOGY}::test_another_precision_begins_with_the_widest_weights"
BACK = f"{RESTORED}::test_parameters_buffers_groups_and_schedulers_come_back"
STREAMS = "checkpoint/test_streams.py::test_each_process_has_its_own_random_streams_back"
OWN = f"{RESTORED}::test_each_rank_has_its_own_state_back_or_one_made_from_all"
WITH_GRADIENTS = "test_a_restore_with_gradients_that_no_step_has_used_is_an_error_on_every_rank_and_changes_nothing"
LOADER, RESTORER = "zero.checkpoint.read.loader.Loader", "zero.checkpoint.read.restorer.Restorer"

RESUMED = "state/test_strides.py::test_a_resumed_run_is_the_undisturbed_one"


def reading_row_major(_: Any) -> Any:
    return lambda header: header


def agreeing_over_gradients(agree_to_load: Any) -> Any:
    def agree(self: Any, purpose: str) -> None:
        schedule = self._reducer._schedule
        kept, schedule.has_new_gradients = schedule.has_new_gradients, False
        try:
            agree_to_load(self, purpose)
        finally:
            schedule.has_new_gradients = kept

    return agree


MUTANTS = (
    Mutant(
        "noted-strides-are-not-read",
        ("P32", "P45"),
        "A file says that eigenvectors were column-major, and they come back row-major.",
        (Wrap("zero.checkpoint.format.tensorfile.with_strides", reading_row_major),),
        (f"{RESUMED}[mixed-(2, 2)-load]",),
    ),
    Mutant(
        "a-restore-leaves-gradients-of-other-weights",
        ("L2", "P32"),
        "A restore takes place over gradients that no step has used: the next step applies them to other weights.",
        (Wrap("zero.engine.Engine.agree_to_load", agreeing_over_gradients),),
        (f"checkpoint/test_moments.py::{WITH_GRADIENTS}[with_a_clip-1]",),
    ),
    # other topologies
    Mutant(
        "as-many-ranks-as-saved-it",
        ("S63", "P32"),
        "A checkpoint can be restored by as many ranks as have saved it, and by no other number.",
        (
            Edit(
                f"{RESTORER}._check_rank_state",
                "if self._rank_state is not None and not same and self._reshard is None:",
                "if not same and self._reshard is None:",
            ),
        ),
        (f"{GOES_ON}[fp32-nadam]",),
    ),
    Mutant(
        "resumes-as-from-scratch",
        ("S64",),
        "The weights come back alone: training goes on as if the optimizer was a new one.",
        (
            Edit(
                f"{RESTORER}.__init__",
                "= optimizer_too, rng, reshard",
                "= optimizer_too and not optimizer, rng, reshard",
            ),
        ),
        (f"{GOES_ON}[fp32-nadam]",),
    ),
    Mutant(
        "every-rank-reads-the-first-elements",
        ("S64", "P32"),
        "Each rank reads its part of a parameter from the parameter's beginning.",
        (
            Edit(
                f"{LOADER}._expect",
                "slot_part(key, piece, bucket.spec, (low, high), dtype.itemsize)",
                "Part(key, (piece.begin - low) * dtype.itemsize, 0, piece.numel * dtype.itemsize)",
            ),
        ),
        (f"{GOES_ON}[fp32-nadam]",),
    ),
    Mutant(
        "files-of-ranks-that-were-not-there",
        ("S64",),
        "A rank looks for its own file, also if fewer ranks have saved.",
        (Edit(f"{RESTORER}._rest", "if checkpoint.world_size == world:", "if checkpoint.world_size and world:"),),
        (f"{GOES_ON}[fp32-nadam]",),
    ),
    Mutant(
        "absent-states-become-empty",
        ("S87", "P45"),
        "A parameter that was never used has an empty state after a load.",
        (
            Edit(
                f"{LOADER}._state",
                "        if not names and not scalars and not values:\n            return None\n",
                "",
            ),
        ),
        ("checkpoint/test_without_states.py::test_a_parameter_that_was_never_used_has_no_state_after_a_load",),
    ),
    Mutant(
        "a-newer-version-is-read",
        ("S66", "P53"),
        "A checkpoint of a newer version of the format is read as if it was one of this version.",
        (
            Edit(
                "zero.checkpoint.format.manifest.Manifest.from_bytes",
                'found["version"] != VERSION:',
                'found["version"] < VERSION:',
            ),
        ),
        ("checkpoint/test_manifest.py::test_another_version_is_an_error_of_its_own_before_anything_else_is_read[2]",),
    ),
    # moments
    Mutant(
        "a-restore-does-not-wait-for-the-save",
        ("S69",),
        "A restore right after a save takes the checkpoint before it.",
        (
            Edit(
                "zero.checkpoint.manager.CheckpointManager.restore",
                "            self._saving.wait()\n",
                "            self._saving.done()\n",
            ),
        ),
        ("checkpoint/test_moments.py::test_a_restore_waits_for_the_save_under_way",),
    ),
    Mutant(
        "a-broken-checkpoint-is-the-end",
        ("S70",),
        "A broken newest checkpoint is not followed by the one before: the run cannot go on.",
        (Edit(f"{RESTORER}.restore", "fall_back=step is None)", "fall_back=step is not None)"),),
        (f"{RESTORED}::test_a_broken_newest_checkpoint_is_told_and_the_one_before_is_taken",),
    ),
    Mutant(
        "a-load-counts-a-step",
        ("S90",),
        "A load takes a step to make the states: step counts are one too high.",
        (
            Edit(
                f"{LOADER}._state",
                "memory_of(as_bytes(tensors[name]))[:] = data\n",
                'memory_of(as_bytes(tensors[name]))[:] = data\n            tensors[name] += name == "step"\n',
            ),
        ),
        (f"{GOES_ON}[fp32-nadam]",),
    ),
    # random streams, and the data
    Mutant(
        "a-stream-that-is-refused-is-a-fresh-one",
        ("S77", "P46"),
        "An error while the random generators are restored is swallowed: their streams are fresh ones.",
        (
            Edit(
                f"{RESTORER}._rest",
                '                others = set_generators(saved["rng"])\n',
                "                others = []\n"
                "                try:\n"
                '                    set_generators({**saved["rng"], "torch": saved["rng"]["numpy"]})\n'
                "                except TypeError:\n"
                "                    pass\n",
            ),
        ),
        (STREAMS, f"{RESTORED}::test_random_streams_go_on_with_as_many_ranks_and_are_named_otherwise"),
    ),
    Mutant(
        "rank-0s-streams-on-all-ranks",
        ("S91", "P46"),
        "All ranks draw the random numbers of rank 0 after a load: all but one draw wrong ones.",
        (
            Edit(
                f"{RESTORER}._rest",
                'set_generators(saved["rng"])',
                'set_generators(checkpoint.rank_state(0)["rng"])',
            ),
        ),
        (STREAMS,),
    ),
    Mutant(
        "equal-keys-of-ranks-are-one",
        ("S91", "S93"),
        "Tensors of one name in the files of several ranks are taken for one: all ranks have the last rank's.",
        (
            Edit(
                "zero.checkpoint.read.reader.Checkpoint.tree",
                "        tensors = self.read_all(path)\n",
                '        files = self.paths(path.rpartition("/")[0])\n'
                "        tensors = {name: tensor for file in files for name, tensor in self.read_all(file).items()}\n",
            ),
        ),
        (STREAMS,),
    ),
    Mutant(
        "one-of-several-generators-is-not-restored",
        ("S92", "P46"),
        "NumPy's generator goes on with another stream after a load, and nothing is said.",
        (Edit("zero.checkpoint.user_state.set_generators", '    np.random.set_state(states["numpy"])\n', ""),),
        (STREAMS,),
    ),
    Mutant(
        "streams-that-are-not-restored-are-not-named",
        ("P46",),
        "At another number of ranks the random generators are not restored, and nothing says so.",
        (
            Edit(
                f"{RESTORER}._rest",
                "            if self._rng:\n                missing.append(",
                "            if not self._rng:\n                missing.append(",
            ),
        ),
        (f"{RESTORED}::test_random_streams_go_on_with_as_many_ranks_and_are_named_otherwise",),
    ),
    Mutant(
        "rank-0s-position-on-all-ranks",
        ("S93", "P47"),
        "Every rank goes on at rank 0's place in the data: batches of the others never come.",
        (Edit(f"{RESTORER}._rest", 'own = saved["rank_state"]', 'own = checkpoint.rank_state(0)["rank_state"]'),),
        (OWN,),
    ),
    Mutant(
        "positions-of-further-ranks-are-lost",
        ("S94", "P47"),
        "At a smaller number of ranks the states of the last ones are not handed on: their data is lost.",
        (Edit(f"{RESTORER}._rest", "for number in range(checkpoint.world_size)]", "for number in range(world)]"),),
        (OWN,),
    ),
    Mutant(
        "positions-of-other-ranks-are-left-out-in-silence",
        ("S94",),
        "At another number of ranks each rank's own state is not restored, although it was asked for.",
        (
            Edit(
                f"{RESTORER}._check_rank_state",
                "if self._rank_state is not None and not same and self._reshard is None:",
                "if self._rank_state is not None and same and self._reshard is not None:",
            ),
        ),
        (OWN,),
    ),
    Mutant(
        "the-data-begins-anew",
        ("S93", "P47"),
        "A run that was resumed takes the data of the first steps again.",
        (
            Edit(
                "zero.commands.train.rank.Training._backwards",
                "micro_batch(config.seed, step, index,",
                "micro_batch(config.seed, len(self.step_ms), index,",
            ),
        ),
        ("commands/test_saves.py::test_a_resumed_run_is_the_undisturbed_one[first3-then3-both3]",),
    ),
    # values
    Mutant(
        "loaded-states-are-rounded",
        ("S88", "P54"),
        "Moments in fp32 are cast to the parameter's 16 bits when they are loaded.",
        (
            Edit(
                f"{LOADER}._expect_states",
                "dtype = bucket.spec.dtypes.master_dtype if follows",
                "dtype = bucket.spec.dtypes.param_dtype if follows",
            ),
        ),
        (f"{GOES_ON}[fp16-sgd]",),
    ),
    Mutant(
        "narrow-weights-instead-of-the-masters",
        ("S54", "P54"),
        "At another precision training goes on from the rounded weights instead of the master weights.",
        (
            Edit(
                "zero.checkpoint.read.fit.Fit.widest",
                "self.masters.get(stored.name, self.model[stored.name])",
                "self.model[stored.name]",
            ),
        ),
        (f"{PRECISION}[bf16-fp32]",),
    ),
    Mutant(
        "options-of-before-the-load",
        ("S89", "P45"),
        "Of the options of a param group the learning rate alone is restored: the first step has another weight decay.",
        (
            Edit(
                f"{LOADER}.load",
                "            group.update(options)\n",
                '            group.update({key: value for key, value in options.items() if key == "lr"})\n',
            ),
        ),
        (f"{BACK}[1-2]",),
    ),
    Mutant(
        "schedulers-are-not-restored",
        ("S89", "P45"),
        "The caller's objects keep the state that they were built with.",
        (
            Edit(
                "zero.checkpoint.user_state.restored",
                "            value.load_state_dict(saved[key])\n",
                "            value.load_state_dict(value.state_dict())\n",
            ),
        ),
        (f"{BACK}[1-2]",),
    ),
    Mutant(
        "saved-tuples-become-lists",
        ("P45",),
        "A tuple, `betas` say, comes back as a list.",
        (
            Edit(
                "zero.core.statetree._decode_tagged",
                "return tuple([_decode(item, tensors, kinds) for item in content])",
                "return [_decode(item, tensors, kinds) for item in content]",
            ),
        ),
        ("checkpoint/test_statetree.py::test_a_value_comes_back_with_its_types_its_order_and_its_bits",),
    ),
    Mutant(
        "masters-of-what-is-frozen-again-are-lost",
        ("P45", "P54"),
        "A parameter that was trained for a while and is frozen now comes back without its master weights.",
        (
            Edit(
                "zero.checkpoint.contents.Contents._extra_masters",
                "                found.append(piece.slot)\n",
                "                assert piece\n",
            ),
        ),
        ("checkpoint/test_reader.py::test_master_weights_of_what_was_trained_for_a_while_come_back",),
    ),
    Mutant(
        "states-that-are-no-tensors-are-lost",
        ("P45",),
        "Of a parameter's state the tensors are saved, and a plain number that counts its updates is not.",
        (
            Edit(
                "zero.checkpoint.write.plan.WritePlan._lay_out",
                "in sorted(found.values.items()))",
                "in sorted(found.values.items())[:0])",
            ),
        ),
        (f"{TOPOLOGY}::test_states_that_are_no_tensors_come_back",),
    ),
    Mutant(
        "transposed-weights-are-written-as-they-lie",
        ("P33",),
        "A parameter whose memory is not row-major is written in the order of its memory.",
        (
            Edit(
                "zero.checkpoint.write.capture.Capture._capture_permuted",
                "flat.as_strided(spec.shape, spec.stride).cpu().contiguous()",
                "flat.cpu().clone()",
            ),
        ),
        (f"{BACK}[1-2]",),
    ),
)
