"""Mutants of ranks that die, leave and come while a job goes on."""

from __future__ import annotations

from .mutant import Edit, Mutant

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
)
