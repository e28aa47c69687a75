"""Mutants of what a save writes: the values of one moment, the plan of who writes which bytes, and their checksums."""

from __future__ import annotations

from typing import Any

from .mutant import Edit, Mutant, Wrap

SNAPSHOT, EXTENTS, LATER, READER = (
    f"checkpoint/test_{name}.py" for name in ("snapshot", "extents", "later_saves", "reader")
)
STEP = f"{SNAPSHOT}::test_a_step_changes_nothing_of_a_save_of_which_the_disk_has_taken_none_one_some_or_all"
FOLLOWS = f"{SNAPSHOT}::test_whatever_follows_changes_nothing_of_a_save"
ONCE = f"{EXTENTS}::test_all_ranks_together_write_every_byte_of_the_tensors_once"
CONTENT = "checkpoint/test_topology.py::test_every_topology_writes_the_same_bytes[2-stage0-0.0005MiB]"
CLASSES = "checkpoint/test_topology.py::test_every_class_and_precision_has_one_content_and_goes_on"
CAPTURE = "zero.checkpoint.write.capture.Capture"
PLAN = "zero.checkpoint.write.plan.WritePlan"
RESUMED = "state/test_strides.py::test_a_resumed_run_is_the_undisturbed_one"


def noting_nothing(_: Any) -> Any:
    return lambda *_: None


MUTANTS = (
    Mutant(
        "strides-of-states-are-not-noted",
        ("P32", "P45"),
        "Eigenvectors come back row-major from a checkpoint: products with them have other last bits.",
        (Wrap("zero.checkpoint.contents.stride_to_note", noting_nothing),),
        (f"{RESUMED}[mixed-(2, 2)-load]",),
    ),
    # the values of one moment
    Mutant(
        "no-gate-before-an-update",
        ("S69", "P34"),
        "A step updates states that the disk has not taken yet: the checkpoint has some of the next step.",
        (
            Edit(
                "zero.step.update.Update.step",
                "                begin if self.watchers else None,\n",
                "                None,\n",
            ),
        ),
        (f"{STEP}[1-3]",),
    ),
    Mutant(
        "the-gate-of-another-bucket",
        ("S69", "P34"),
        "Before the update of a bucket the states of the next one are copied.",
        (
            Edit(
                "zero.step.update.Update.step",
                "watcher.before_update(bucket.spec.index)",
                "watcher.before_update(bucket.spec.index + 1)",
            ),
        ),
        (f"{STEP}[1-3]",),
    ),
    Mutant(
        "no-gate-before-a-load",
        ("S69", "P34"),
        "A load overwrites states in the offload's files that the disk has not taken yet.",
        (
            Edit(
                "zero.engine.Engine.before_load",
                "                watcher.before_update(bucket.spec.index)\n",
                "                assert watcher and bucket\n",
            ),
        ),
        (f"{SNAPSHOT}::test_master_weights_and_states_on_disk_are_those_at_the_save[disk-1]",),
    ),
    Mutant(
        "an-update-does-not-wait-for-the-chunk-in-hand",
        ("S69",),
        "An update changes a bucket while a chunk of it is copied: half of the chunk is of the next step.",
        (
            Edit(
                "zero.checkpoint.write.snapshot.Snapshot.before_update",
                "self._over or bucket not in self._taking",
                "True",
            ),
        ),
        (f"{SNAPSHOT}::test_an_update_waits_for_the_copy_of_its_own_bucket_alone",),
    ),
    Mutant(
        "parameters-are-not-copied",
        ("S69", "P34"),
        "Parameters are written from their own memory, which a user may edit and a gather overwrites.",
        (
            Edit(
                f"{CAPTURE}._capture_buckets",
                "            self._stage((WEIGHTS, number), bucket.weights.interval(low, high).detach())\n",
                "            self.staged[WEIGHTS, number] = as_bytes(bucket.weights.interval(low, high))\n",
            ),
        ),
        (f"{FOLLOWS}[edits without asking-0]",),
    ),
    Mutant(
        "the-callers-state-is-not-copied",
        ("S69", "P34"),
        "Tensors in the caller's state are written from their own memory, while the caller goes on to change them.",
        (Edit(f"{CAPTURE}.add_tree", "as_bytes(tensor.cpu().contiguous()).clone()", "as_bytes(tensor.cpu())"),),
        (f"{STEP}[1-3]",),
    ),
    Mutant(
        "saved-masters-are-not-those-of-the-weights",
        ("S54", "P54"),
        "Saved master weights are those of the last step, although parameters were written since.",
        (
            Edit(
                f"{CAPTURE}._capture_masters",
                "as_bytes(now.synced())",
                "as_bytes(now.synced() if wide is None else wide.cpu())",
            ),
        ),
        (f"{READER}::test_saved_master_weights_follow_what_was_written_into_the_parameters",),
    ),
    Mutant(
        "a-save-counts-a-step",
        ("S90",),
        "A save has the step counts of a step that was taken to make the states.",
        (Edit(f"{CAPTURE}._capture_scalars", "as_bytes(v.detach().cpu()", "as_bytes((v + 1).detach().cpu()"),),
        (f"{READER}::test_the_optimizers_dict_is_the_plain_one",),
    ),
    Mutant(
        "a-save-draws-a-random-number",
        ("P52",),
        "A save advances the random generators: the run that saves is another one than the run that does not.",
        (
            Edit(
                "zero.checkpoint.user_state.generators",
                '        "torch": torch.get_rng_state(),\n',
                '        "torch": (torch.rand(1), torch.get_rng_state())[1],\n',
            ),
        ),
        ("checkpoint/test_streams.py::test_a_save_leaves_the_random_streams_as_they_are",),
    ),
    Mutant(
        "copies-stay-until-the-save-is-over",
        ("P50",),
        "What an update has copied is kept after the disk has taken it.",
        (
            Edit(
                "zero.checkpoint.write.snapshot.Snapshot.take",
                "self._staged.pop(source, None)",
                "self._staged.get(source)",
            ),
        ),
        (f"{SNAPSHOT}::test_copies_are_dropped_as_soon_as_they_were_taken",),
    ),
    # who writes which bytes
    Mutant(
        "files-in-the-order-of-buckets",
        ("S66", "P31"),
        "Tensors lie in the files in the order of the buckets, which depends on their size.",
        (
            Edit(
                f"{PLAN}._lay_out",
                "TensorEntry(stored.name, NAMES[stored.dtype], stored.shape) for stored in contents.model]",
                "TensorEntry(stored.name, NAMES[stored.dtype], stored.shape)\n"
                "            for stored in sorted(contents.model, key=lambda each: each.place or (-1, 0))]",
            ),
        ),
        (f"{READER}::test_the_models_tensors_are_in_order_of_registration", CONTENT),
    ),
    Mutant(
        "offsets-of-the-layout",
        ("S67", "P31"),
        "A piece is written at its offset in the bucket instead of that in its parameter.",
        (
            Edit(
                "zero.checkpoint.format.extents.slot_part",
                "    begin = piece.begin - bucket.slots[piece.slot].offset\n",
                "    begin = piece.begin\n",
            ),
        ),
        (ONCE,),
    ),
    Mutant(
        "padding-is-written",
        ("S60",),
        "A piece is written with the padding behind it, over the beginning of the next tensor.",
        (
            Edit(
                "zero.checkpoint.format.extents.slot_part",
                "begin * itemsize, piece.numel * itemsize)",
                "begin * itemsize,\n"
                "                -(-piece.numel // bucket.dtypes.alignment) * bucket.dtypes.alignment * itemsize)",
            ),
        ),
        (ONCE,),
    ),
    Mutant(
        "the-last-part-of-a-tensor-is-written",
        ("S67", "P33"),
        "Of a tensor that lies in several blocks the bytes in the last one are written alone.",
        (
            Edit(
                "zero.checkpoint.format.extents.chunks",
                "in split(start, start + part.nbytes, block_bytes):",
                "in list(split(start, start + part.nbytes, block_bytes))[-1:]:",
            ),
        ),
        (ONCE,),
    ),
    Mutant(
        "the-first-holder-writes-everything",
        ("S80",),
        "Of several ranks that hold a slice the first one writes all of it, at stage 0 everything.",
        (
            Edit(
                "zero.checkpoint.format.extents.Writers.interval",
                "EvenCuts(end - begin, holders, bucket.dtypes.alignment).owned(number)",
                "(0, end - begin) if holders and not number else (0, 0)",
            ),
        ),
        (f"{EXTENTS}::test_a_rank_writes_only_what_it_holds_and_ranks_that_hold_the_same_write_equal_shares",),
    ),
    Mutant(
        "a-slot-without-elements-has-no-writer",
        ("S65",),
        "A parameter without elements has a state that no rank describes: it is unknown when it is loaded.",
        (
            Edit(
                "zero.checkpoint.format.extents.Writers.first_of",
                "if piece.begin == bucket.slots[piece.slot].offset}",
                "if piece.numel and piece.begin == bucket.slots[piece.slot].offset}",
            ),
        ),
        (f"{EXTENTS}::test_every_slot_has_one_rank_that_writes_its_first_element",),
    ),
    Mutant(
        "what-rank-0-has-is-common-to-all",
        ("S65", "S87"),
        "Which states there are is what rank 0 has: those of parameters that lie on other ranks are not saved.",
        (Edit("zero.checkpoint.contents.Contents.merge", "for data in told:", "for data in told[:1]:"),),
        (f"{CLASSES}[fp16-sgd]",),
    ),
    Mutant(
        "scalars-of-rank-0-where-there-are-none",
        ("S87", "P45"),
        "A parameter that was never used is saved with the states that rank 0 has of another one.",
        (
            Edit(
                "zero.checkpoint.contents.Contents.merge",
                "        for number in self.updated:\n",
                '        common = next(map(SlotState.from_json, json.loads(told[0])["kinds"]))\n'
                "        for number in self.updated:\n"
                "            for slot in range(len(self.buckets[number].specs)):\n"
                "                states.setdefault((number, slot), SlotState({}, common.tensors, {}, {}))\n",
            ),
        ),
        (f"{CLASSES}[fp32-nadam]",),
    ),
    Mutant(
        "scalars-are-zeros",
        ("S68", "P45"),
        "Step counts are saved as 0.",
        (
            Edit(
                f"{CAPTURE}._capture_scalars",
                "torch.stack(rows).index_select(0, numbers).view(-1)",
                "torch.stack(rows).index_select(0, numbers).view(-1).zero_()",
            ),
        ),
        (f"{READER}::test_the_optimizers_dict_is_the_plain_one",),
    ),
    Mutant(
        "buffers-of-all-ranks",
        ("P31",),
        "Of a buffer each rank writes a part of its own values, although they differ.",
        (
            Edit(
                f"{PLAN}._plan_whole",
                "(0, nbytes if rank == 0 else 0) if stored.is_buffer else even_part(nbytes, world, rank)",
                "even_part(nbytes, world, rank)",
            ),
        ),
        ("checkpoint/test_restored.py::test_the_model_folder_is_the_models_state_dict",),
    ),
    Mutant(
        "aliases-are-not-saved",
        ("P33", "P45"),
        "Further names of tied parameters are lost: a strict load of the model fails.",
        (
            Edit(
                f"{PLAN}._lay_out",
                "for alias in stored.aliases}",
                "for alias in stored.aliases[:0]}",
            ),
        ),
        (f"{READER}::test_the_models_tensors_load_strictly_into_a_new_model",),
    ),
    Mutant(
        "options-that-the-class-does-not-know-are-lost",
        ("S87", "P45"),
        "Of a param group only the options of the optimizer's class are saved, `initial_lr` is not.",
        (
            Edit(
                "zero.checkpoint.contents.Contents.param_groups",
                "if key not in NO_OPTIONS}",
                "if key in inner.defaults and key not in NO_OPTIONS}",
            ),
        ),
        (f"{READER}::test_options_of_param_groups_keep_their_types",),
    ),
    Mutant(
        "states-that-come-later-are-not-saved",
        ("P45",),
        "The plan of the first save serves for good: states that parameters got since are missing.",
        (
            Edit(
                "zero.checkpoint.write.plan_cache.PlanCache.permuted",
                "if self._described is None or self._told != list(told):",
                "if self._described is None:",
            ),
        ),
        (f"{LATER}::test_all_stages_and_numbers_of_ranks_write_the_same_bytes_also_in_later_saves",),
    ),
    Mutant(
        "every-save-makes-its-plan",
        ("S97", "P51"),
        "Each save plans anew, with Python calls for each parameter.",
        (
            Edit(
                "zero.checkpoint.write.plan_cache.PlanCache.plan",
                "if self._plan is None or sizes != self._sizes:",
                "if self._plan is None or sizes:",
            ),
        ),
        (f"{LATER}::test_a_plan_serves_the_next_save_if_no_layout_has_changed[step]",),
    ),
    Mutant(
        "a-chunk-for-each-tensor",
        ("S97", "P51"),
        "Each tensor is written by calls of its own, however small it is.",
        (
            Edit(
                "zero.checkpoint.format.extents.chunks",
                "if run and (low % block_bytes == 0 or low != run[-1].begin + run[-1].nbytes):",
                "if run:",
            ),
        ),
        (f"{EXTENTS}::test_neighbours_in_a_file_are_one_chunk_also_from_several_sources",),
    ),
    # bytes and checksums
    Mutant(
        "checksums-of-other-bytes",
        ("S75", "P38"),
        "A checksum is not that of the bytes that are written: what is read never fits.",
        (
            Edit(
                "zero.checkpoint.write.chunk_writer.ChunkWriter.write",
                "zlib.crc32(data)",
                "zlib.crc32(self._view[:nbytes])",
            ),
        ),
        (CONTENT,),
    ),
    Mutant(
        "combined-with-the-wrong-length",
        ("P31",),
        "The checksums of two ranks are combined with the length of the first one's bytes.",
        (
            Edit(
                "zero.checkpoint.format.checksums.block_sums",
                "combine(sums[-1], fragment.crc32, fragment.length)",
                "combine(sums[-1], fragment.crc32, fragment.begin % block_bytes)",
            ),
        ),
        ("checkpoint/test_checksums.py::test_the_checksums_of_blocks_do_not_depend_on_the_cuts",),
    ),
    Mutant(
        "ragged-ends-are-not-written",
        ("P33",),
        "Of bytes that are written past the page cache those behind the last whole page are lost.",
        (
            Edit(
                "zero.checkpoint.write.chunk_writer.ChunkWriter.write",
                "        files.write_at(self._file, data[high - begin :], high)\n",
                "",
            ),
        ),
        ("checkpoint/test_chunk_writer.py::test_all_bytes_are_written_at_any_place[direct]",),
    ),
    Mutant(
        "the-content-has-what-ranks-have",
        ("P31",),
        "The content depends on the files of the ranks, and so on their number.",
        (
            Edit(
                "zero.checkpoint.format.manifest.Manifest.content",
                "if not path.startswith(_OF_RANKS)}",
                "if path or not path.startswith(_OF_RANKS)}",
            ),
        ),
        ("checkpoint/test_manifest.py::test_the_content_depends_on_the_files_alone_but_not_on_those_of_ranks",),
    ),
)
