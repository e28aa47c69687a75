"""All mutants, in the order of the table."""

from __future__ import annotations

from . import mutants_ranks, mutants_sums, mutants_update

MUTANTS = (*mutants_sums.MUTANTS, *mutants_ranks.MUTANTS, *mutants_update.MUTANTS)
