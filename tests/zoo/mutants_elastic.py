"""Mutants of ranks that die, leave and come while a job goes on."""

from __future__ import annotations

from .mutant import Edit, Mutant

LOCK = "checkpoint/test_directory.py::test_a_stopped_worker_that_was_replaced_loses_the_lock_and_no_other_process_does"
TAKE = "zero.checkpoint.folder.lock.FolderLock._take"
ELASTIC = "commands/test_elastic.py"

MUTANTS = (
    Mutant(
        "an-orphan-goes-on",
        ("S96", "P49"),
        "The worker of an agent that was killed lives on, and keeps training.",
        (
            Edit(
                "zero.runtime.process_group.bind_to_parent",
                "    end_with_parent(signal.SIGKILL)\n",
                "",
            ),
        ),
        ("runtime/test_process_group.py::test_a_rank_ends_with_the_process_that_started_it",),
    ),
    Mutant(
        "one-rank-alone-hears-of-a-signal",
        ("S96", "P48"),
        "A signal is heard by the first rank alone: the others wait for a rank that has left.",
        (
            Edit(
                "zero.checkpoint.stop_request.StopOnSignal.before_step",
                "enumerate(reports)",
                "enumerate(reports[:1])",
            ),
        ),
        (f"{ELASTIC}::test_all_ranks_hear_of_a_signal_to_one_of_them_in_the_same_step",),
    ),
    Mutant(
        "a-signal-loses-a-step",
        ("S96", "P48"),
        "A rank that is asked to end does so without a save.",
        (
            Edit(
                "zero.commands.train.saves.Saves.after_step",
                "if why is not None or step == last",
                "if step == last",
            ),
        ),
        (f"{ELASTIC}::test_a_signal_to_the_only_rank_saves_the_step_and_the_same_command_goes_on",),
    ),
    Mutant(
        "a-stopped-worker-keeps-the-lock",
        ("P49",),
        "A worker that was stopped and replaced holds the lock, and writes once it is continued.",
        (Edit(TAKE, "if older and state == STOPPED:", "if not older:"),),
        (f"{LOCK}[stopped]",),
    ),
    Mutant(
        "a-worker-that-runs-loses-the-lock",
        ("P49",),
        "A worker that may be saving is killed by the one that replaces it.",
        (Edit(TAKE, "if older and state == STOPPED:", "if older:"),),
        (f"{LOCK}[running]",),
    ),
    Mutant(
        "a-job-without-a-name-is-every-job",
        ("P49",),
        "A stopped process of a job to which nobody gave a name is killed by another such job.",
        (Edit("zero.checkpoint.folder.holder.Holder.me", '"" if job == _NO_JOB else job', "job"),),
        (f"{LOCK}[of a job without a name]",),
    ),
)
