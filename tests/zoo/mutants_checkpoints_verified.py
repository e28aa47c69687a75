"""Mutants of reading files: what is verified before anything changes, what is opened, and what a load costs."""

from __future__ import annotations

from .mutant import Edit, Mutant

DAMAGE, ERRORS, FORGED, READ = (
    f"checkpoint/test_{name}.py" for name in ("damage", "restore_errors", "forged", "reads")
)
LOADER, RESTORER = "zero.checkpoint.read.loader.Loader", "zero.checkpoint.read.restorer.Restorer"

MUTANTS = (
    # what is verified
    Mutant(
        "blocks-are-not-compared",
        ("S75", "P38"),
        "A changed bit is read as it is.",
        (
            Edit(
                "zero.checkpoint.read.file_reader.FileReader.read_block",
                "read != length or found != self._sums.crc32[block]",
                "read != length",
            ),
        ),
        (f"{DAMAGE}::test_every_flipped_bit_is_found_and_named[101]",),
    ),
    Mutant(
        "the-last-block-is-not-compared",
        ("S75", "P38"),
        "The last block of a file, which is shorter than the others, is not compared with its checksum.",
        (
            Edit(
                "zero.checkpoint.read.file_reader.FileReader.read_block",
                "found != self._sums.crc32[block]",
                "(length == self._block and found != self._sums.crc32[block])",
            ),
        ),
        (f"{DAMAGE}::test_every_flipped_bit_is_found_and_named[101]",),
    ),
    Mutant(
        "sizes-are-not-compared",
        ("P38",),
        "A file that has become longer is a whole one.",
        (
            Edit(
                "zero.checkpoint.read.file_reader.FileReader.__enter__",
                "if size != self._sums.nbytes:",
                "if size < self._sums.nbytes:",
            ),
        ),
        (f"{DAMAGE}::test_a_file_that_is_cut_off_anywhere_or_longer_is_named",),
    ),
    Mutant(
        "added-files-are-not-noticed",
        ("P38",),
        "A file that could be taken for a part of the checkpoint may lie in its folder.",
        (Edit("zero.checkpoint.read.tensor_folder._may_mislead", "return not path", "return not path and not path"),),
        (f"{DAMAGE}::test_an_added_file_that_could_be_taken_for_a_part_is_named[a link-optimizer/x]",),
    ),
    Mutant(
        "nothing-is-verified-before-it-is-loaded",
        ("S75", "P38"),
        "A broken block is found when half of the optimizer has been overwritten.",
        (
            Edit(
                f"{RESTORER}._verify",
                "                    reader.verify(first, last, threads)\n",
                "                    assert reader.blocks and threads\n",
            ),
        ),
        (f"{ERRORS}::test_a_broken_block_behind_the_header_is_found_before_anything_changes",),
    ),
    Mutant(
        "a-pickle-is-unpickled",
        ("S76", "P39"),
        "A file of the checkpoint that is a pickle is unpickled, which runs its code.",
        (
            Edit(
                "zero.checkpoint.read.reader.Checkpoint.tree",
                "        tensors = self.read_all(path)\n",
                '        if (self.path / path).read_bytes()[:1] == b"\\x80":\n'
                "            import pickle\n\n"
                "            pickle.loads((self.path / path).read_bytes())\n"
                "        tensors = self.read_all(path)\n",
            ),
        ),
        (f"{FORGED}::test_a_pickle_is_never_unpickled[pickle-ranks/rank-00000.safetensors]",),
    ),
    Mutant(
        "links-are-followed",
        ("P39",),
        "A link in the folder of a checkpoint leads to any file of the machine.",
        (
            Edit(
                "zero.checkpoint.files.read_only",
                "opened(parent, _FOLDER | _NO_LINK, place)",
                "opened(parent, _FOLDER, place)",
            ),
            Edit(
                "zero.checkpoint.files.read_only",
                "opened(name, _READ, place)",
                "opened(name, _READ & ~_NO_LINK, place)",
            ),
        ),
        (f"{FORGED}::test_a_folder_that_is_a_link_is_never_entered[model/model-00001-of-00001.safetensors]",),
    ),
    Mutant(
        "paths-leave-the-folder",
        ("P39",),
        "A manifest may name files outside of the checkpoint's folder.",
        (
            Edit(
                "zero.checkpoint.format.manifest.check_path",
                'part in ("", ".", "..") for part in parts)',
                'part in ("", ".") for part in parts)',
            ),
        ),
        (f"{FORGED}::test_a_forged_checkpoint_is_a_checkpoint_error[a path outside]",),
    ),
    Mutant(
        "a-checkpoint-of-other-dtypes-is-taken",
        ("S61",),
        "Numbers with a fraction are loaded into a tensor of whole ones.",
        (
            Edit(
                "zero.checkpoint.read.fit.Fit._check_model",
                "if dtype is not stored.dtype and not (",
                "if dtype is None and not (",
            ),
        ),
        (f"{ERRORS}::test_what_cannot_be_restored_is_named_on_every_rank_and_nothing_changes[another dtype]",),
    ),
    # what a load costs
    Mutant(
        "a-load-makes-a-second-copy",
        ("S95", "P50"),
        "All that a rank has is read into a copy, and then copied to its place.",
        (
            Edit(
                f"{LOADER}._expect",
                'direct = dtype is into.dtype and into.device.type == "cpu"',
                'direct = dtype is into.dtype and into.device.type == "cuda"',
            ),
        ),
        (f"{READ}::test_a_load_needs_no_memory_but_two_blocks",),
    ),
    Mutant(
        "every-rank-reads-everything",
        ("S97", "P51"),
        "At stage 0 each rank reads the whole checkpoint instead of its part.",
        (
            Edit(
                f"{LOADER}._interval",
                "return bucket.spec.owned(self._rank)",
                "whole = self._contents.parts.stage.states is Placement.WHOLE\n"
                "        return (0, bucket.spec.numel) if whole else bucket.spec.owned(self._rank)",
            ),
        ),
        (f"{READ}::test_all_ranks_together_read_each_byte_twice[0]",),
    ),
    Mutant(
        "a-block-is-read-for-each-tensor",
        ("S97", "P51"),
        "A block is read, and its checksum formed, once for each tensor in it.",
        (
            Edit(
                "zero.checkpoint.read.parts.PartReader.read",
                "for block, of_block in itertools.groupby(of_file, key=lambda chunk: chunk.begin // block_bytes)",
                "for (block, _), of_block in itertools.groupby(\n"
                "                    of_file, key=lambda chunk: (chunk.begin // block_bytes, chunk.begin)\n"
                "                )",
            ),
        ),
        (f"{READ}::test_a_rank_reads_a_block_of_many_tensors_once",),
    ),
)
