"""All mutants, in the order of the table."""

from __future__ import annotations

from . import (
    mutants_checkpoints_commit,
    mutants_checkpoints_written,
    mutants_classes,
    mutants_compiled,
    mutants_frozen,
    mutants_habits,
    mutants_late,
    mutants_messages,
    mutants_meta,
    mutants_norms,
    mutants_offload,
    mutants_precision,
    mutants_processes,
    mutants_ranks,
    mutants_resident,
    mutants_sharing,
    mutants_states,
    mutants_sums,
    mutants_units,
    mutants_update,
)

MUTANTS = (
    *mutants_sums.MUTANTS,
    *mutants_ranks.MUTANTS,
    *mutants_late.MUTANTS,
    *mutants_norms.MUTANTS,
    *mutants_update.MUTANTS,
    *mutants_classes.MUTANTS,
    *mutants_states.MUTANTS,
    *mutants_units.MUTANTS,
    *mutants_resident.MUTANTS,
    *mutants_precision.MUTANTS,
    *mutants_sharing.MUTANTS,
    *mutants_offload.MUTANTS,
    *mutants_meta.MUTANTS,
    *mutants_habits.MUTANTS,
    *mutants_messages.MUTANTS,
    *mutants_frozen.MUTANTS,
    *mutants_processes.MUTANTS,
    *mutants_compiled.MUTANTS,
    *mutants_checkpoints_written.MUTANTS,
    *mutants_checkpoints_commit.MUTANTS,
)
