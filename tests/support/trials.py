"""Results of trials of optimizer classes, remembered: a trial takes longer than all else that most tests do.

A trial is remembered by all that decides it: the class, its arguments, the options of the param groups, dtypes, devices
and shapes. A trial with an option that cannot be pickled is never remembered, and no refusal is but that the class is
not element-wise: the text of others names the user's parameters.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Hashable
from typing import Any

import pytest

from zero.step.block_trial import ByBlocks
from zero.step.trial import Trial
from zero.step.user_optimizer import NotElementwiseError


def remember(patch: pytest.MonkeyPatch) -> None:
    """Let equal trials run once. Ranks that are threads wait for the one of them that runs it."""
    found: dict[Hashable, tuple[Any, str | None]] = {}
    rules: dict[Hashable, Any] = {}  # what a trial by blocks notes beside its result
    locks: dict[Hashable, threading.Lock] = {}
    run = Trial.run

    @functools.wraps(run)
    def remembered(trial: Trial) -> Any:
        try:
            options = pickle.dumps([trial.inner.arguments, trial.options])
        except (pickle.PicklingError, AttributeError, TypeError):
            return run(trial)
        key = (type(trial), trial.inner.optimizer_class, options, tuple(trial.settings))
        with locks.setdefault(key, threading.Lock()):
            if key not in found:
                try:
                    found[key] = run(trial), None
                    rules[key] = trial.rules if isinstance(trial, ByBlocks) else {}
                except NotElementwiseError as error:
                    found[key] = None, error.why
        result, why = found[key]
        if why is not None:
            raise NotElementwiseError(trial.inner.name, why)
        if isinstance(trial, ByBlocks):
            trial.rules = rules[key]
        return result

    patch.setattr(Trial, "run", remembered)


def forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trial, "run", Trial.run.__wrapped__)  # type: ignore[attr-defined]
