"""Mutants of the folder of checkpoints: what is synced before the rename, who may write, what is kept and removed."""

from __future__ import annotations

from .mutant import Edit, Mutant

COMMIT, DIRECTORY, FULL = (f"checkpoint/test_{name}.py" for name in ("commit", "directory", "disk_full"))
SYNCED = f"{COMMIT}::test_everything_is_synced_before_the_rename_and_the_rename_after"
CRASH = f"{COMMIT}::test_after_any_crash_the_newest_checkpoint_is_whole_and_none_is_lost[2]"
LEFT = f"{COMMIT}::test_after_any_crash_the_next_run_removes_what_a_save_or_a_removal_has_left[False]"
FOLDER, RENAMES = "zero.checkpoint.write.save_folder.SaveFolder", "zero.checkpoint.write.commit.Commit"

MUTANTS = (
    Mutant(
        "files-are-not-synced",
        ("S74", "P37"),
        "The files of a checkpoint are still in the page cache when the rename makes them one.",
        (Edit("zero.checkpoint.files.sync_file", "        sync(number)\n", "        assert number >= 0\n"),),
        (SYNCED,),
    ),
    Mutant(
        "the-manifest-is-not-synced",
        ("S74",),
        "The one file that makes a checkpoint of the others is written and not synced.",
        (Edit("zero.checkpoint.files.write_new", "        sync(number)\n", ""),),
        (SYNCED,),
    ),
    Mutant(
        "folders-are-not-synced",
        ("S74", "P37"),
        "The entries of the folders in a checkpoint are not synced before the rename: after a crash files are missing.",
        (
            Edit(
                f"{FOLDER}.commit",
                "            files.sync_folder(self.temporary / folder)\n",
                "            assert (self.temporary / folder).is_dir()\n",
            ),
        ),
        (CRASH,),
    ),
    Mutant(
        "the-rename-is-not-synced",
        ("S74", "S71", "P37"),
        "A save is reported as complete while its rename may still be lost in a crash.",
        (
            Edit(
                f"{RENAMES}.run",
                "        try:\n            files.sync_folder(parent)\n        except",
                "        try:\n            assert self._target.exists()\n        except",
            ),
        ),
        (SYNCED,),
    ),
    Mutant(
        "a-rank-believes-in-a-rename-that-it-has-seen",
        ("P36",),
        "A rank reports a save as complete when it sees the folder, which rank 0 may die before it syncs.",
        (
            Edit(
                f"{FOLDER}.wait_until_committed",
                "        _try(files.sync_folder, self.target.parent)\n",
                "",
            ),
        ),
        (SYNCED,),
    ),
    Mutant(
        "the-rename-comes-before-the-manifest",
        ("S70", "P36"),
        "The folder has its final name before it has its manifest: who dies in between leaves half a checkpoint.",
        (
            Edit(f"{FOLDER}.commit", "        files.write_new(self.temporary / NAME, manifest.to_bytes())\n", ""),
            Edit(
                f"{FOLDER}.commit",
                "        self._commit.run(manifest.content, [*aside, *replaced])\n",
                "        self._commit.run(manifest.content, [*aside, *replaced])\n"
                "        files.write_new(self.target / NAME, manifest.to_bytes())\n",
            ),
        ),
        (f"{COMMIT}::test_after_any_crash_a_checkpoint_that_is_replaced_is_the_old_one_or_the_new_one",),
    ),
    Mutant(
        "an-incomplete-folder-is-a-checkpoint",
        ("S70",),
        "The newest folder is the newest checkpoint, whatever it has.",
        (
            Edit(
                "zero.checkpoint.folder.directory.complete_steps",
                "for step, folder in steps_in(directory).items() if is_complete(folder)]",
                "for step, folder in steps_in(directory).items() if folder.is_dir()]",
            ),
        ),
        (f"{DIRECTORY}::test_what_is_no_checkpoint_is_said_to_be_none",),
    ),
    Mutant(
        "older-checkpoints-are-removed-before-the-commit",
        ("S71", "P36"),
        "Older checkpoints are removed while the new one may still fail: then none is left.",
        (
            Edit(
                "zero.checkpoint.retention.StepDestination.commit",
                "        folder.commit(",
                "        self._retention.apply(self._directory, manifest.step)\n        folder.commit(",
            ),
        ),
        (f"{COMMIT}::test_after_any_crash_in_a_removal_the_kept_checkpoints_are_whole",),
    ),
    Mutant(
        "a-failed-save-refuses-later-ones",
        ("S72", "P40"),
        "The error of a save that has failed is raised by the next one, too: nothing is saved any more.",
        (
            Edit(
                "zero.checkpoint.manager.CheckpointManager.save",
                "self._failures.note(self._saving)",
                "self._failures.note(self._saving)\n                problem = self._saving.error",
            ),
        ),
        (f"{FULL}::test_a_disk_that_fails_at_some_call_does_no_harm",),
    ),
    Mutant(
        "what-a-failed-save-wrote-stays",
        ("S72", "S78", "P40"),
        "A save that has failed leaves its files, and a full disk stays full.",
        (
            Edit(
                f"{FOLDER}._remove",
                "                    _try(files.remove, Path(parent, name))\n",
                "                    assert Path(parent, name)\n",
            ),
        ),
        (f"{FULL}::test_a_disk_that_fails_at_some_call_does_no_harm",),
    ),
    Mutant(
        "room-is-found-while-it-is-written",
        ("S78",),
        "Files are made without room for their bytes: a full disk is found when half of them are written.",
        (
            Edit(
                "zero.checkpoint.files.create",
                "not nbytes or reserve(number, nbytes)",
                "not nbytes or os.ftruncate(number, nbytes) is None",
            ),
        ),
        (f"{FULL}::test_a_full_disk_is_found_before_a_byte_is_written_and_says_how_much_is_missing",),
    ),
    Mutant(
        "a-failed-save-ends-the-training",
        ("S78", "P40"),
        "A save that has failed is an error of the next step: one bad write ends a run of days.",
        (
            Edit(
                "zero.checkpoint.failures.Failures._warn",
                "            warn_caller(text)\n",
                "            raise RuntimeError(text)\n",
            ),
        ),
        (f"{FULL}::test_a_failure_is_a_warning_at_the_line_of_the_step_and_an_error_of_close",),
    ),
    Mutant(
        "a-step-that-exists-is-overwritten",
        ("S73",),
        "A checkpoint of a step that exists replaces it, although nobody asked for that.",
        (
            Edit(
                "zero.checkpoint.folder.directory.check_free", "    if not overwrite:\n", "    if overwrite is None:\n"
            ),
            Edit(f"{FOLDER}.commit", "        if replaced and not overwrite:\n", "        if overwrite is None:\n"),
        ),
        (f"{DIRECTORY}::test_a_step_that_exists_is_refused_on_every_rank_and_replaced_if_asked",),
    ),
    Mutant(
        "a-step-is-gone-while-it-is-replaced",
        ("S73", "P36"),
        "Between the two renames of a replacement the step has no checkpoint, neither the old one nor the new one.",
        (
            Edit(
                "zero.checkpoint.folder.directory.steps_in",
                "return dict(sorted({**moved, **found}.items()))",
                "return dict(sorted(found.items()))",
            ),
        ),
        (f"{COMMIT}::test_a_reader_that_finds_only_the_trash_of_a_swap_uses_it",),
    ),
    Mutant(
        "half-a-swap-is-cleaned-away",
        ("P36",),
        "A run that begins removes the old checkpoint of a replacement that was not completed.",
        (
            Edit(
                "zero.checkpoint.folder.directory.LockedDirectory._clean",
                "is_complete(entry) and not os.path.lexists(self.path / trash[1])",
                "is_complete(entry) and os.path.lexists(entry / trash[1])",
            ),
        ),
        (f"{COMMIT}::test_a_reader_that_finds_only_the_trash_of_a_swap_uses_it",),
    ),
    Mutant(
        "files-are-looked-for-under-another-name",
        ("R10",),
        "Steps are written with eight digits and looked for without: no checkpoint is ever found.",
        (
            Edit(
                "zero.checkpoint.folder.directory.steps_in",
                "entry.name == step_name(int(step[1]))",
                'entry.name == f"step-{int(step[1])}"',
            ),
        ),
        (f"{DIRECTORY}::test_a_step_whose_name_is_written_otherwise_is_none",),
    ),
    Mutant(
        "the-lock-is-ignored",
        ("L20",),
        "A second run, or an orphan of the last one, writes into the folder, too.",
        (
            Edit(
                "zero.checkpoint.folder.lock._Flock.take",
                "not files.lock(self._number)",
                "not files.lock(self._number) and self._number < 0",
            ),
        ),
        (f"{DIRECTORY}::test_a_second_run_is_refused_and_names_the_first_on_every_rank",),
    ),
    Mutant(
        "a-lock-that-was-lost-is-not-noticed",
        ("L20",),
        "A run whose lock another one has replaced commits beside it.",
        (
            Edit(
                "zero.checkpoint.retention.StepDestination.commit",
                "self._directory.check, above)",
                "lambda: None, above)",
            ),
        ),
        (f"{DIRECTORY}::test_a_lock_that_is_lost_while_a_save_is_under_way_fences_its_commit",),
    ),
    Mutant(
        "a-child-holds-the-lock",
        ("L20",),
        "A forked child, a worker of a data loader say, holds the lock after its parent has ended: no run can go on.",
        (
            Edit(
                "zero.checkpoint.folder.lock.FolderLock.__init__",
                "        os.register_at_fork(after_in_child=self._closing)\n",
                "",
            ),
        ),
        (f"{DIRECTORY}::test_a_forked_process_does_not_hold_the_lock_after_its_parent",),
    ),
    Mutant(
        "retention-counts-saves-under-way",
        ("S85", "P43"),
        "A folder of a save under way counts as a checkpoint that is kept: one whole checkpoint fewer is.",
        (
            Edit(
                "zero.checkpoint.retention.Retention.apply",
                "others[self._max_to_keep - 1 :]",
                'others[self._max_to_keep - 1 - len(list(directory.path.glob(".tmp-step-*"))) :]',
            ),
        ),
        (f"{DIRECTORY}::test_what_is_left_of_other_saves_is_not_counted_as_kept",),
    ),
    Mutant(
        "retention-counts-broken-checkpoints",
        ("S85", "P43"),
        "A checkpoint with a changed bit counts as one that is kept: a whole one is removed for it.",
        (
            Edit(
                "zero.checkpoint.retention.Retention.apply",
                "others and not self._is_whole(directory.path, others[0])",
                "not others",
            ),
        ),
        (f"{DIRECTORY}::test_a_broken_checkpoint_is_neither_counted_nor_removed",),
    ),
    Mutant(
        "retention-remembers-what-it-has-saved",
        ("S85",),
        "Retention goes by its own list of steps: one that the user has removed counts as kept, and one too few is.",
        (
            Edit(
                "zero.checkpoint.retention.Retention.apply",
                "in reversed(complete_steps(directory.path))",
                "in sorted({*self._whole, *complete_steps(directory.path)}, reverse=True)",
            ),
        ),
        (f"{DIRECTORY}::test_a_checkpoint_that_the_user_has_removed_is_not_missed",),
    ),
    Mutant(
        "what-the-user-put-there-is-removed",
        ("S85", "P43"),
        "A checkpoint is removed with everything in it, also with files that somebody has put there.",
        (
            Edit(
                "zero.checkpoint.folder.directory.LockedDirectory.remove",
                "            strange = foreign(there[step])\n",
                "            strange = None\n",
            ),
            Edit(
                "zero.checkpoint.folder.directory.remove_checkpoint",
                "    strange = foreign(folder)\n",
                "    strange = None\n",
            ),
        ),
        (f"{DIRECTORY}::test_a_checkpoint_with_anything_foreign_is_left_and_named",),
    ),
    Mutant(
        "the-period-is-not-kept",
        ("P43",),
        "Checkpoints that were to be kept for good are removed with the others.",
        (
            Edit(
                "zero.checkpoint.retention.Retention.apply",
                "other % self._keep_period)",
                "step % self._keep_period != other)",
            ),
        ),
        (f"{DIRECTORY}::test_the_newest_are_kept_and_those_of_a_period_beside_them",),
    ),
    Mutant(
        "notes-are-removed-and-that-is-not-synced",
        ("S74", "P37"),
        "After a crash a checkpoint has the notes of its save again.",
        (
            Edit(
                f"{FOLDER}.commit",
                "        files.remove_folder(self.temporary / NOTES)\n        files.sync_folder(self.temporary)\n",
                "        files.remove_folder(self.temporary / NOTES)\n",
            ),
        ),
        (CRASH,),
    ),
    Mutant(
        "after-a-crash-a-save-is-nobody-s",
        ("P40",),
        "The nonce of a save is not synced before its room is reserved: after a crash no run removes its files.",
        (
            Edit(
                f"{FOLDER}.make_files",
                '            files.sync_file(self._note("nonce"))\n        files.sync_folder(self.temporary / NOTES)\n'
                "        if not files.sync_folder(self.temporary):\n",
                "            assert self.nonce\n        if not self.nonce:\n",
            ),
        ),
        (LEFT,),
    ),
    Mutant(
        "manifests-are-removed-first",
        ("P43",),
        "A removal that is interrupted leaves files of which nothing shows that they were a checkpoint's.",
        (
            Edit(
                "zero.checkpoint.folder.directory.remove_checkpoint",
                "            if (Path(parent) / name) not in marks:\n",
                "            if Path(parent) / name != folder:\n",
            ),
        ),
        (LEFT,),
    ),
    Mutant(
        "a-replacement-that-fails-leaves-a-gap",
        ("S73", "P40"),
        "When the second rename of a replacement fails, the old checkpoint is not put back to its place.",
        (
            Edit(
                f"{RENAMES}.take_back",
                "                    files.rename(place, source)\n",
                "                    assert place != source\n",
            ),
        ),
        (f"{FULL}::test_a_checkpoint_whose_replacement_fails_stays_at_its_place",),
    ),
    Mutant(
        "who-has-lost-the-lock-removes",
        ("L20",),
        "A run that has lost its lock after a commit removes checkpoints of the run that has it.",
        (
            Edit("zero.checkpoint.folder.directory.LockedDirectory.remove", "            self.check()\n", ""),
            Edit("zero.checkpoint.folder.directory.LockedDirectory.remove_trash", "        self.check()\n", ""),
        ),
        (f"{DIRECTORY}::test_a_lock_that_is_lost_after_a_commit_fences_the_removal_of_older_checkpoints",),
    ),
)
