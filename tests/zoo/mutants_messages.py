"""What is told when something cannot go on, and by whom."""

from __future__ import annotations

from .mutant import Edit, Mutant

ASSEMBLY, OPTIMIZER = "zero/assembly.py", "zero/optimizer.py"
CLOSE = "test_close.py"
TAKEN = f"{CLOSE}::test_every_call_of_the_older_names_the_takeover_and_its_close_leaves_the_newer_alone"

MUTANTS = (
    Mutant(
        "a-close-fails-for-what-it-lost",
        ("L3",),
        "The first close() after a parameter was replaced raises instead of telling what is lost.",
        (Edit(OPTIMIZER, '            return f"{error}{of}"\n', "            raise\n"),),
        (
            f"{CLOSE}::test_close_works_at_the_first_call_says_what_is_lost_and_another_optimizer_trains_on[1-replace-1]",
        ),
    ),
    Mutant(
        "a-close-hides-the-error-before-it",
        ("L3",),
        "In the user's `finally`, what close() cannot do takes the place of the error that ended the training.",
        (Edit(OPTIMIZER, "            if first is None:\n                raise\n", "            raise\n"),),
        (f"{CLOSE}::test_a_close_that_fails_never_hides_the_error_before_it[in_finally-1]",),
    ),
    Mutant(
        "what-is-not-listed-is-taken-over-in-silence",
        ("L12",),
        "Stage 3 shards parameters that an older optimizer trains, and that one is not told.",
        (Edit(ASSEMBLY, "            self.reducer.hooks.take_over(parameter)\n", "            pass\n"),),
        (f"{TAKEN}[1-3-others, of the same module]",),
    ),
)
