"""Mutants of the trial that an optimizer class must pass before it is run on pieces."""

from __future__ import annotations

from .mutant import Edit, Mutant

TEST = "step/test_elementwise.py::"
REFUSED = f"{TEST}test_a_class_that_treats_shapes_differently_or_looks_beyond_an_element_is_refused"

MUTANTS = (
    Mutant(
        "classes-are-tried-on-vectors-alone",
        ("L12",),
        "A class that decays matrices and not vectors is taken, and no matrix decays.",
        (
            Edit(
                "zero.step.trial.ByElement.choose",
                "sorted(DIMENSIONS | {len(spec.shape) for spec in parameters})",
                "[1]",
            ),
        ),
        (f"{REFUSED}[DecayMatricesOnly]",),
    ),
    Mutant(
        "only-usual-numbers-of-dimensions-are-tried",
        ("L12",),
        "A class that treats the weights of convolutions over time differently, of three dimensions, is taken.",
        (
            Edit(
                "zero.step.trial.ByElement.choose",
                "DIMENSIONS | {len(spec.shape) for spec in parameters}",
                "DIMENSIONS",
            ),
        ),
        (f"{REFUSED}[DecaySignalsOnly]",),
    ),
    Mutant(
        "a-trial-of-few-steps",
        ("L12",),
        "A class that warms up as an element-wise one is taken.",
        (Edit("zero.step.trial", "STEPS = 12  # more", "STEPS = 3  # more"),),
        (f"{TEST}test_so_is_one_that_begins_to_after_some_steps[9-DecayMatricesOnly]",),
    ),
    Mutant(
        "no-gradient-is-orthogonal",
        ("L12",),
        "A branch that only gradients orthogonal to their parameter reach, as in AdamP, is never tried.",
        (Edit("zero.step.throwaway.Whole.gradients", "        if step % 3 == 1:\n", "        if step < 0:\n"),),
        (f"{REFUSED}[Projected]",),
    ),
    Mutant(
        "a-class-is-tried-with-its-defaults",
        ("L12",),
        "What the user's param groups say is not tried: a weight decay that is off by default is never seen.",
        (Edit("zero.step.trial.distinct", "given = {**defaults, **given}", "given = {**given, **defaults}"),),
        (f"{TEST}test_the_options_of_every_group_count",),
    ),
    Mutant(
        "rounding-hides-what-a-class-does",
        ("L12",),
        "A rate that begins at zero, for a scheduler to raise, makes every class pass.",
        (Edit("zero.step.trial", "RAISED_RATE = 0.3\n", "RAISED_RATE = 0.0\n"),),
        (f"{TEST}test_a_rate_so_low_that_nothing_shows_hides_nothing[dtype0]",),
    ),
    Mutant(
        "only-raised-rates-are-tried",
        ("L12",),
        "A class that does something else at low rates is taken.",
        (
            Edit(
                "zero.step.trial.ByElement.steps",
                "            self.compare_with([()], FEW_STEPS)\n",
                "            pass\n",
            ),
        ),
        (f"{TEST}test_the_rate_of_the_groups_is_tried_as_it_is",),
    ),
    Mutant(
        "single-elements-are-not-tried",
        ("L12",),
        "A class that spares vectors of one element is taken, and steps them with their neighbours.",
        (Edit("zero.step.trial._shapes", ", *([(1,)] if (1,) in setting.shapes else [])]", "]"),),
        (f"{TEST}test_a_vector_of_one_element_is_tried_where_there_is_one",),
    ),
    Mutant(
        "small-matrices-stand-for-large-ones",
        ("L12",),
        "A class that treats large matrices alone as matrices is taken.",
        (Edit("zero.step.trial._shapes", "(131, 137) if setting.matrices else (13, 17)", "(13, 17)"),),
        (f"{REFUSED}[LargeMatricesApart]",),
    ),
    Mutant(
        "what-a-class-counts-is-not-compared",
        ("L12",),
        "A class that adds up over all parameters, to use the sum later, is taken.",
        (
            Edit(
                "zero.step.trial.Trial.compare",
                "            self._compare_rest(whole, rank, names)\n",
                "",
            ),
        ),
        (f"{REFUSED}[EstimatesTogether]",),
    ),
)
