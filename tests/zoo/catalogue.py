"""All mutants, in the order of the table."""

from __future__ import annotations

from . import (
    mutants_compiled,
    mutants_meta,
    mutants_norms,
    mutants_offload,
    mutants_precision,
    mutants_ranks,
    mutants_sharing,
    mutants_states,
    mutants_sums,
    mutants_units,
    mutants_update,
)

MUTANTS = (
    *mutants_sums.MUTANTS,
    *mutants_ranks.MUTANTS,
    *mutants_norms.MUTANTS,
    *mutants_update.MUTANTS,
    *mutants_states.MUTANTS,
    *mutants_units.MUTANTS,
    *mutants_precision.MUTANTS,
    *mutants_sharing.MUTANTS,
    *mutants_offload.MUTANTS,
    *mutants_meta.MUTANTS,
    *mutants_compiled.MUTANTS,
)
