"""Mutants of saves on several ranks: what they agree on, what one learns of another's failure, what a save sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mutant import Edit, Mutant, Wrap

AGREEMENT, COMMIT, FULL, MOMENTS, SNAPSHOT = (
    f"checkpoint/test_{name}.py" for name in ("save_agreement", "commit", "disk_full", "moments", "snapshot")
)
DIFFERENT = f"{AGREEMENT}::test_ranks_that_save_other_things_learn_the_rank_and_the_key_before_a_byte_is_written"
SENT = f"{AGREEMENT}::test_a_run_that_saves_after_every_step_sends_what_one_sends_that_never_saves[1]"
SAVING = "zero.checkpoint.write.save_thread.Saving"
SAVER = "zero.checkpoint.write.saver.Saver"


def looks_for_the_checkpoint(real: Callable[..., str]) -> Callable[..., str]:
    """Let a rank look whether the checkpoint is at its place, and not for what rank 0 has announced."""

    def wrong(this: Any) -> str:
        from zero.checkpoint.write.save_folder import _committed

        nonce, content = _committed(this.target)
        if nonce != this.nonce:
            raise this._given_up()
        return content

    return wrong


def never_settles(real: Callable[..., None]) -> Callable[..., None]:
    """Let every rank keep what it has seen itself of the end of a save."""
    return lambda this, outcomes: None


MUTANTS = (
    Mutant(
        "paths-are-not-compared",
        ("S86", "P44"),
        "Ranks save to different folders, and in none there is everything.",
        (Edit(f"{SAVER}._collect", '                "the folder": str(request.target),\n', ""),),
        (f"{AGREEMENT}::test_ranks_that_save_to_other_paths_are_told",),
    ),
    Mutant(
        "states-are-not-compared",
        ("P44",),
        "The state that should be equal on all ranks differs, and rank 0's is saved.",
        (
            Edit(
                f"{SAVER}._collect",
                'for key, digest in digests(state, "state").items()}',
                'for key, digest in digests(state, "state").items() if not digest}',
            ),
        ),
        (f"{DIFFERENT}[state]",),
    ),
    Mutant(
        "what-ranks-did-not-agree-on-stays",
        ("P44",),
        "The folder of a save to which the ranks did not agree is left.",
        (
            Edit(
                f"{SAVER}.save",
                "        except BaseException:\n            own_folder.remove_rest()\n",
                "        except BaseException:\n",
            ),
        ),
        (f"{DIFFERENT}[state]",),
    ),
    Mutant(
        "a-failure-is-not-reported",
        ("S79", "P41"),
        "What fails on one rank, and cannot be noted in the folder, is unknown to the others in the next step.",
        (
            Edit(
                f"{SAVING}._fail",
                "        if not isinstance(self.error, GivenUpError):\n",
                "        if isinstance(self.error, GivenUpError):\n",
            ),
        ),
        (f"{FULL}::test_a_disk_that_fails_at_some_call_does_no_harm",),
    ),
    Mutant(
        "a-failed-rank-leaves-no-note",
        ("S79", "P41"),
        "The other ranks wait for the part of a rank that has failed until their time limit, and never learn why.",
        (Edit(f"{SAVING}._fail", "        self._folder.report_failed(str(self.error))\n", ""),),
        (f"{FULL}::test_a_blocking_save_that_fails_on_one_rank_ends_at_once_on_all_with_its_cause",),
    ),
    Mutant(
        "an-error-has-no-rank",
        ("S79",),
        "The error of a save does not say which rank has failed.",
        (
            Edit(
                f"{SAVING}._as_save_error",
                'SaveError(f"rank {self._rank} could not save',
                'SaveError(f"could not save',
            ),
        ),
        (f"{FULL}::test_a_blocking_save_that_fails_on_one_rank_ends_at_once_on_all_with_its_cause",),
    ),
    Mutant(
        "long-writes-are-given-up",
        ("P41",),
        "A rank gives up after its time limit although the others still write.",
        (Edit("zero.checkpoint.write.save_folder.SaveFolder._wait", "if seen != newest:", "if newest < 0:"),),
        (f"{MOMENTS}::test_a_rank_waits_as_long_as_the_others_write_and_not_longer_than_the_group_s_limit",),
    ),
    Mutant(
        "a-thread-that-failed-ends-no-save",
        ("S83",),
        "When the thread that writes has failed, the save is never over: who asks for its result waits for ever.",
        (
            Edit(
                f"{SAVING}._run",
                "        finally:\n            self._plan = None\n            self._finished.set()\n",
                "        else:\n            self._plan = None\n            self._finished.set()\n",
            ),
        ),
        (f"{FULL}::test_a_failure_is_a_warning_at_the_line_of_the_step_and_an_error_of_close",),
    ),
    Mutant(
        "a-step-waits-for-a-thread-that-failed",
        ("S83", "P41"),
        "A step waits until chunks were taken, by a thread that has failed.",
        (
            Edit(
                f"{SAVING}._run",
                "            try:\n                manifest = self._save(plan)\n            finally:\n"
                "                plan.snapshot.end()  # before anything else: no step waits for what follows\n",
                "            manifest = self._save(plan)\n            plan.snapshot.end()\n",
            ),
            Edit(f"{SAVING}._run", "            self._plan = None\n", ""),
        ),
        (f"{SNAPSHOT}::test_an_error_of_the_thread_never_blocks_a_step[0]",),
    ),
    Mutant(
        "a-save-that-is-over-keeps-its-copies",
        ("S84", "P51"),
        "What a save has copied lives as long as the object that it returned: memory grows with every save.",
        (
            Edit(f"{SAVING}._run", "            self._plan = None\n", ""),
            Edit(
                "zero.checkpoint.write.snapshot.Snapshot.end",
                "            self._staged.clear()\n            self._open.clear()\n",
                "",
            ),
            Edit(
                "zero.checkpoint.write.snapshot.Snapshot.take",
                "self._staged.pop(source, None)",
                "self._staged.get(source)",
            ),
        ),
        (f"{SNAPSHOT}::test_a_save_that_is_over_holds_nothing_of_what_it_wrote",),
    ),
    Mutant(
        "an-old-checkpoint-that-cannot-be-removed-fails-the-save",
        ("P40",),
        "A save whose checkpoint is complete has failed, because an older one could not be removed.",
        (Edit(f"{SAVING}._tidy", "except Exception as error:", "except ZeroDivisionError as error:"),),
        (f"{FULL}::test_an_older_checkpoint_that_cannot_be_removed_is_no_failure_of_the_save[rename]",),
    ),
    Mutant(
        "the-thread-asks-the-other-ranks",
        ("S81", "S82", "P42"),
        "The threads of a save meet over the group of training, which waits for them meanwhile.",
        (
            Edit(
                f"{SAVER}.save",
                "        saving.start(asynchronous=not request.blocking)  #",
                "        from collectives import Kind, Tag\n\n"
                '        save, tag = saving._save, Tag(Kind.EXCHANGE, "written")\n'
                "        saving._save = lambda plan: (save(plan), self._transport.exchange(b'', tag))[0]\n"
                "        saving.start(asynchronous=not request.blocking)\n"
                "        saving.wait()  #",
            ),
        ),
        (SENT,),
    ),
    Mutant(
        "a-save-meets-twice",
        ("P42", "P52"),
        "A save costs two exchanges of messages.",
        (
            Edit(
                f"{SAVER}.save",
                "            told = parts.agree_to_save(",
                '            parts.agree_to_save(text, b"")\n            told = parts.agree_to_save(',
            ),
        ),
        (SENT,),
    ),
    Mutant(
        "a-checkpoint-that-was-moved-was-given-up",
        ("P41",),
        "Rank 0 moves a checkpoint as soon as it is complete, and a rank that looks for it later says that it failed.",
        (Wrap("zero.checkpoint.write.save_folder.SaveFolder._announced", looks_for_the_checkpoint),),
        (f"{COMMIT}::test_a_checkpoint_may_be_moved_or_removed_as_soon_as_one_rank_has_returned[True-moved]",),
    ),
    Mutant(
        "what-a-rank-could-not-see-it-never-learns",
        ("P41",),
        "A rank that cannot look at the folder calls a save failed that is complete for all others.",
        (Wrap(f"{SAVING}.settle", never_settles),),
        (f"{COMMIT}::test_a_rank_that_sees_nothing_of_the_folder_says_so_and_learns_it_from_rank_0",),
    ),
    Mutant(
        "a-second-save-does-not-wait",
        ("S69",),
        "A second save takes the memory from which the first one is still written.",
        (Edit("zero.checkpoint.manager.CheckpointManager.save", "            self._saving.wait()\n", ""),),
        (f"{MOMENTS}::test_a_save_while_another_is_under_way_waits",),
    ),
)
