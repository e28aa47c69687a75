"""The restoring of one checkpoint on all ranks: which one, what they agree on before anything changes, and the rest.

Knows: the exchanges of a restore. Does not know: how bytes become states (`loader`).

    rank 0 chooses a folder -> every rank compares it with its optimizer, and verifies a part of its blocks -> all agree
    -> every rank loads -> the caller's objects, random generators

A file that fails is found before the first byte of the optimizer changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...optimizer import ZeroOptimizer
from ..contents import Contents
from ..folder.directory import set_aside, step_name, steps_in
from ..folder.model_parts import ModelParts, marks_of
from ..format.manifest import VersionError
from ..options import check_step, warn_caller
from ..sharded_optimizer import ShardedOptimizer
from ..user_state import check_generators, check_keys, restored, set_generators
from .loader import Differences, Fit, Loader
from .reader import Checkpoint, CheckpointError, threads_of_rank

Reshard = Callable[[Sequence[Mapping[str, Any]], int, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
        step: the number with which the checkpoint was saved.
        path: its folder.
        content: the SHA-256 that identifies the saved state.
        not_restored: what was not saved, or could not be restored, and why.
        missing_keys: what the model has and the checkpoint does not: it is as it was, without states.
        unexpected_keys: saved names that the model does not have, or that ``rename`` left out.
        mismatched_keys: what has another shape in the checkpoint: it is as it was, without states.
        resized_keys: what has another number of rows in the checkpoint: the rows that both have were read.
        state, rank_state: saved values that no object of the caller received.
    """

    step: int
    path: Path
    content: str
    not_restored: tuple[str, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched_keys: tuple[str, ...] = ()
    resized_keys: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Any] = field(default_factory=dict)


class Restorer:
    """One call of `restore` on one rank. Arguments: those of `CheckpointManager.restore`."""

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        state: Mapping[str, Any] | None,
        rank_state: Mapping[str, Any] | None,
        allowed: Differences,
        *,
        optimizer_too: bool,
        rng: bool,
        reshard: Reshard | None,
    ) -> None:
        self._optimizer, self._allowed = optimizer, allowed
        self._state, self._rank_state = state, rank_state
        self._with_states, self._rng, self._reshard = optimizer_too, rng, reshard
        self.parts = ModelParts(optimizer)
        self.broken: list[Path] = []  # checkpoints instead of which an older one was tried

    def restore(self, directory: Path, step: int | None) -> Restored | None:
        """Restore ``step``, or the newest that is not broken. Collective. None if there is none at all."""
        with self.parts.comparing():
            return self._restore(directory, step)

    def _restore(self, directory: Path, step: int | None) -> Restored | None:
        paths: list[tuple[str, int]] = []
        problem: Exception | None = None
        try:
            paths = self._choose(directory, step)
        except Exception as error:
            problem = error
        mine = [None if problem is None else str(problem), paths]
        found = [json.loads(data) for data in self._optimizer.exchange(json.dumps(mine).encode())]
        if problem is not None:
            raise problem
        for rank, (theirs, _) in enumerate(found):
            if theirs is not None:
                raise ValueError(f"rank {rank}: {theirs}")
        told = self._in_all_parts([(Path(path), number) for path, number in found[0][1]], step)
        if not told:
            return None
        try:
            return self._load(told[:1] if step is not None else told, fall_back=step is None)
        except CheckpointError as error:
            if step is None or not told[1:]:
                raise
            raise CheckpointError(f"{error}; older steps: {', '.join(str(number) for _, number in told[1:])}") from None

    def _in_all_parts(self, told: list[tuple[Path, int]], step: int | None) -> list[tuple[Path, int]]:
        """Return those of this part's checkpoints whose steps all parts of the model have. Collective."""
        if not self.parts.name:
            return told
        common = self.parts.common(marks_of({number: path for path, number in told}))
        if step is not None and step not in common:
            raise CheckpointError(f"step {step} is not complete in every part of the model; those that are: {common}")
        newer = [path for path, number in told if common and number > common[0] and step is None]
        if newer:
            self.broken += newer
            warn_caller(f"{newer[0]} is not complete in every part of the model; step {common[0]} is taken instead")
        if not common:
            self.parts.finished()
        return [(path, number) for path, number in told if number in common]

    def _choose(self, directory: Path, step: int | None) -> list[tuple[str, int]]:
        """Return, on rank 0, the folders of ``step`` (None: the newest) and of older ones, with their steps. Local."""
        if step is not None:
            check_step(step)
        if self._optimizer.rank != 0:
            return []
        try:
            there = steps_in(directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be read ({error.strerror or error})") from error
        if step is not None and step not in there and (aside := set_aside(directory, step)):
            raise CheckpointError(
                f"step {step} of {directory} was set aside as {', '.join(path.name for path in aside)} when training "
                "went on from a lower step: zero.load() reads it by path, and renamed to its step it counts again"
            )
        older = [number for number in reversed(there) if step is None or number < step]
        wanted = older if step is None else [step, *older]
        return [(str(there.get(number, directory / step_name(number))), number) for number in wanted]

    @torch.no_grad()
    def load(
        self, paths: Sequence[tuple[Path, int | None]], *, fall_back: bool, purpose: str = "restore()"
    ) -> Restored:
        """Load the first of these checkpoints that is not broken. Collective.

        ``paths``: with the step of each; None: any. ``fall_back``: whether another one is tried after a broken one.
        ``purpose``: the call that an error names.
        """
        with self.parts.comparing():
            return self._load(paths, fall_back=fall_back, purpose=purpose)

    @torch.no_grad()
    def _load(
        self, paths: Sequence[tuple[Path, int | None]], *, fall_back: bool, purpose: str = "restore()"
    ) -> Restored:
        ShardedOptimizer(self._optimizer).agree_to_load(purpose)
        for number, (path, step) in enumerate(paths):
            loader, checkpoint, problem = self._try(path, step)
            broken = self.parts.broken(self._agree(checkpoint, problem, loader))
            if broken is None:
                self.parts.finished()
                assert loader is not None
                assert checkpoint is not None
                ShardedOptimizer(self._optimizer).load(loader.load)
                return self._rest(checkpoint, loader.fit)
            left = [older.name for older, _ in paths[number + 1 :]]
            if not fall_back or not left:
                raise CheckpointError(broken)
            self.broken.append(path)
            warn_caller(f"{broken}; {left[0]} is tried instead")
        raise CheckpointError("there is no checkpoint")

    def _try(self, path: Path, step: int | None) -> tuple[Loader | None, Checkpoint | None, Exception | None]:
        """Compare a checkpoint with the optimizer, and verify this rank's part of its blocks. Local."""
        checkpoint: Checkpoint | None = None
        try:
            checkpoint = Checkpoint(path)
            if step is not None and checkpoint.step != step:
                raise ValueError(f"{path} was saved as step {checkpoint.step}: give its folder that name again")
            self.parts.check(checkpoint.manifest.written_by.get("part"), path)
            rank, world = self._optimizer.rank, self._optimizer.world_size
            checkpoint.verify_part(rank, world, threads_of_rank(world))
            contents = Contents(ShardedOptimizer(self._optimizer))
            fit = Fit(contents, checkpoint, self._allowed, with_states=self._with_states)
            check_keys(self._state, checkpoint.state, "state")
            self._check_rank_state(checkpoint)
            return Loader(contents, checkpoint, fit, with_states=self._with_states), checkpoint, None
        except Exception as error:
            return None, checkpoint, error

    def _check_rank_state(self, checkpoint: Checkpoint) -> None:
        same = checkpoint.world_size == self._optimizer.world_size
        if self._rank_state is not None and not same and self._reshard is None:
            raise ValueError(
                f"rank_state was saved for {checkpoint.world_size} ranks, and this run has "
                f"{self._optimizer.world_size}: pass reshard=, which makes a rank's state from those of all, or leave "
                "out rank_state"
            )
        needed = [self._optimizer.rank] if same else []
        if not same and self._reshard is not None:
            needed = list(range(checkpoint.world_size))
        for number in needed:
            saved = checkpoint.rank_state(number)  # raises if it is damaged
            if same:
                check_keys(self._rank_state, saved["rank_state"], "rank_state")
                if self._rng:
                    check_generators(saved["rng"])

    def _agree(self, checkpoint: Checkpoint | None, problem: Exception | None, loader: Loader | None) -> str | None:
        """Return, as text, why the checkpoint is broken; None if it can be loaded. Collective.

        Raises on every rank if it is whole, but does not fit.
        """
        newer = problem is not None and isinstance(problem.__cause__, VersionError)  # whole, but not readable here
        broken = isinstance(problem, (CheckpointError, OSError)) and not newer
        names = hashlib.sha256(b"" if checkpoint is None else checkpoint.manifest.to_bytes()).hexdigest()
        taken = None if loader is None else loader.fit.digest()
        mine = [None if problem is None else str(problem), broken, names, taken]
        told = [json.loads(data) for data in self._optimizer.exchange(json.dumps(mine).encode())]
        if problem is not None and not broken:
            raise problem
        for rank, (theirs, is_broken, _, _) in enumerate(told):
            if theirs is not None and not is_broken:
                raise ValueError(f"rank {rank}: {theirs}")
        found: list[str] = [theirs for theirs, _, _, _ in told if theirs is not None]
        if found:
            return found[0]
        for rank, (_, _, theirs, taken) in enumerate(told):
            if theirs != told[0][2]:
                raise ValueError(f"rank {rank} sees another checkpoint than rank 0: all ranks must see one folder")
            if taken != told[0][3]:
                raise ValueError(f"rank {rank} passes other strict=, rename= or resize= than rank 0")
        return None

    def _rest(self, checkpoint: Checkpoint, fit: Fit) -> Restored:
        """Restore what is beside the optimizer."""
        rank, world = self._optimizer.rank, self._optimizer.world_size
        missing = [f"{name} (it could not be saved)" for name in checkpoint.not_saved]
        missing += [f"the states of {name!r} ({why}: they begin anew)" for name, why in sorted(fit.anew.items())]
        missing += [
            f"the options of param group {number} (the checkpoint's groups are not those of this optimizer)"
            for number in fit.own_options
        ]
        missing += [
            f"the average {name!r} of {parameter!r} (the checkpoint has none: it begins with the weights)"
            for name, parameters in fit.new_averages.items()
            for parameter in parameters
        ]
        mine, saved_averages = sorted(ShardedOptimizer(self._optimizer).averages.by_name), checkpoint.average_names
        if self._with_states:
            missing += [
                f"the average {name!r} (none was saved: it begins anew)" for name in mine if name not in saved_averages
            ]
            missing += [
                f"the averages {name!r} (no ShardedAverage has this name; open_checkpoint reads them)"
                for name in saved_averages
                if name not in mine
            ]
        else:
            missing += [f"the averages {name!r} (open_checkpoint reads them)" for name in saved_averages]
        state = restored(self._state, checkpoint.state)
        own: Mapping[str, Any] = {}
        if checkpoint.world_size == world:
            saved = checkpoint.rank_state(rank)
            own = saved["rank_state"]
            if self._rng:
                others = set_generators(saved["rng"])
                missing += [f"random generators of {name} (here or there is no such device)" for name in others]
        else:
            everyone = [checkpoint.rank_state(number)["rank_state"] for number in range(checkpoint.world_size)]
            if self._reshard is not None:
                own = self._reshard(everyone, rank, world)
            elif any(everyone):
                missing.append(f"rank_state (saved by {len(everyone)} ranks, and here are {world}: pass reshard=)")
            if self._rng:
                missing.append(f"random generators (saved by {checkpoint.world_size} ranks, and this run has {world})")
        if missing and rank == 0:
            warn_caller(f"not restored from {checkpoint.path}: {', '.join(missing)}")
        rest = restored(self._rank_state, own)
        return Restored(
            checkpoint.step,
            checkpoint.path,
            checkpoint.content,
            tuple(missing),
            tuple(fit.missing),
            tuple(fit.unexpected),
            tuple(fit.mismatched),
            tuple(fit.resized),
            state=state,
            rank_state=rest,
        )
