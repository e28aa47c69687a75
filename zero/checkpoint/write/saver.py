"""A save on all ranks: what they agree on, and what each one then writes.

Knows: the one exchange of a save, and how its outcome becomes a plan. Does not know: which steps a folder keeps.

Nothing is written into a checkpoint's files before all ranks have agreed on where, on the number, and on equal states.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectives import as_a_whole

from ...core.statetree import encode
from ...optimizer import ZeroOptimizer
from ..contents import Contents, StateFacts
from ..folder.model_parts import ModelParts
from ..format.extents import chunks
from ..format.manifest import STATE_FILE, Manifest, rank_file
from ..format.tensorfile import BLOCK_BYTES
from ..sharded_optimizer import ShardedOptimizer
from ..user_state import collected, digests, generators
from .capture import Capture, Snapshot, Source, TreeFile, WritePlan, gather_permuted, permuted_tensors
from .save_folder import SaveError, SaveFolder
from .save_thread import Destination, SavePlan, Saving


@dataclass(frozen=True)
class SaveRequest:
    """One call of `save` on one rank.

    Attributes:
        target: the checkpoint's folder.
        step: the number of the checkpoint.
        state: equal on all ranks; rank_state: this rank's own.
        overwrite: whether a checkpoint that exists is replaced.
        blocking: whether the call waits until it is complete.
        max_shard_bytes: of a file.
        assets: further files that are copied into `model/`, by name.
        block_bytes: of each checksum; equal on all ranks. The checkpoint's `content` depends on it.
        in_parts: whether ranks cannot write into one file there; see `PartWriter`.
        mark: of the save, equal in all parts of a model; empty if it is whole. Rank 0's counts.
        problem: an error that the caller has found; every rank raises it.
    """

    target: Path
    step: int
    state: Mapping[str, Any] | None
    rank_state: Mapping[str, Any] | None
    overwrite: bool = False
    blocking: bool = False
    max_shard_bytes: int = 5 * 10**9
    assets: Mapping[str, bytes] | None = None
    block_bytes: int = BLOCK_BYTES
    in_parts: bool = False
    mark: str = ""
    problem: Exception | None = None


class Saver:
    """Saves one optimizer on one rank."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._transport = ShardedOptimizer(optimizer).transport
        self._room: dict[Source, Tensor] = {}
        self._plan: WritePlan | None = None  # of the last save
        self._planned_for: list[Any] = []  # what it was made from
        self._last: Saving | None = None  # also one whose start was interrupted

    def save(self, request: SaveRequest, destination: Destination | None) -> Saving:
        """Agree and begin. Collective.

        Args:
            request: what to save; every rank gives the same, but for ``rank_state`` and ``problem``.
            destination: on rank 0.

        Raises:
            RuntimeError, ValueError, TypeError: on every rank, if a rank may not save or ranks differ. Nothing is left.
                An error of the disk is not raised here, but ends the save that is returned.
        """
        began = time.perf_counter()
        folder_of = partial(
            SaveFolder,
            request.target,
            rank=self._transport.rank,
            world_size=self._transport.world_size,
            timeout=self._transport.timeout,
            overwrite=request.overwrite,
            in_parts=request.in_parts,
        )
        own_folder = folder_of(secrets.token_hex(8))
        parts, problem = ShardedOptimizer(self._optimizer), request.problem
        own: _Own | None = None
        disk: str | None = None
        try:
            if problem is not None:
                raise problem
            parts.check()
            own = self._collect(request, parts)
            if destination is not None:
                try:
                    destination.check(own_folder, request.step)
                    own_folder.make()
                except OSError as error:
                    if isinstance(error, FileExistsError):
                        raise
                    disk = f"rank 0 could not save {request.target}: {type(error).__name__}: {error}"
        except Exception as error:
            problem = error
        text = None if problem is None else str(problem)
        if isinstance(problem, OSError):
            text = f"{type(problem).__name__}: {problem}"
        message = {} if own is None else {**own.message, "nonce": own_folder.nonce, "disk": disk}
        try:
            told = parts.agree_to_save(text, json.dumps(message).encode())
            found = [json.loads(data) for data in told]
            _compare(found)
        except BaseException:
            own_folder.remove_rest()
            if problem is not None:
                raise problem from None
            raise
        assert own is not None, "all ranks have agreed"
        plan: SavePlan | BaseException
        if found[0]["disk"]:
            plan = SaveError(found[0]["disk"])
        else:
            facts = own.contents.merge([theirs["facts"].encode() for theirs in found])
            with as_a_whole(self._transport, "in save()"):
                gathered = gather_permuted(own.contents, permuted_tensors(own.contents, facts))
            try:
                plan = self._plan_save(request, own, found, facts, gathered)
            except BaseException as error:
                plan = error
        folder = folder_of(found[0]["nonce"])
        self.withdraw()
        saving = self._last = Saving(request.step, folder, plan, destination, parts.report)
        saving.start(asynchronous=not request.blocking)  # raises an interrupt; no other rank waits for this one then
        saving.blocked_ms = 1000 * (time.perf_counter() - began)
        return saving

    def withdraw(self) -> None:
        """Withdraw the report of the last save: every rank has heard of it. Local."""
        if self._last is not None:
            self._last.withdraw()

    def _collect(self, request: SaveRequest, parts: ShardedOptimizer) -> _Own:
        """Return what this rank saves, and what it lets the others have. Raises an error that names a value."""
        rank = self._transport.rank
        contents = Contents(parts)
        state = collected(request.state, "state")
        mine = {"rng": generators(), "rank_state": collected(request.rank_state, "rank_state")}
        tree = TreeFile(rank_file(rank), *encode(mine, "rank_state"))
        message = {
            "facts": contents.describe().decode(),
            "agree": {
                "the step": request.step,
                "the folder": str(request.target),
                "overwrite": request.overwrite,
                **{f"state[{key!r}]": digest for key, digest in digests(state, "state").items()},
                "the averages": {name: average.n_averaged for name, average in contents.averages.with_values()},
                "the model": contents.digest,
            },
            "own": tree.plan.nbytes,
            "host": socket.gethostname(),
        }
        return _Own(contents, contents.param_groups(), tree, TreeFile(STATE_FILE, *encode(state, "state")), message)

    def _plan_save(
        self,
        request: SaveRequest,
        own: _Own,
        found: list[dict[str, Any]],
        facts: StateFacts,
        gathered: Mapping[Source, Tensor],
    ) -> SavePlan:
        """Take a copy of what may change at any time, and plan what this rank writes. Local."""
        rank, contents, groups = self._transport.rank, own.contents, own.groups
        trees = [own.tree, own.of_state] if rank == 0 else [own.tree]
        made_from = [
            contents.digest,
            contents.buckets,
            [theirs["facts"] for theirs in found],
            [name for name, _ in contents.averages.with_values()],
            request.max_shard_bytes,
            request.block_bytes,
        ]
        if self._plan is None or self._planned_for != made_from:  # to make one takes longer than to write a small model
            self._plan = WritePlan(contents, facts, request.max_shard_bytes, request.block_bytes)
            self._planned_for = made_from
        plan = self._plan
        capture = Capture(contents, plan, gathered, trees, self._room)
        shared = plan.files(groups)
        own_files = [tree.plan for tree in trees]
        parts_of_trees = {name: parts for tree in trees for name, parts in tree.parts.items()}
        chunks_of_trees = chunks(own_files, parts_of_trees, request.block_bytes)
        all_chunks = [*plan.chunks(shared), *chunks_of_trees]
        plain = {**plan.indices, **{f"model/{name}": data for name, data in (request.assets or {}).items()}}
        heads = {file.path: file.header for file in own_files}
        if rank == 0:
            heads |= {file.path: file.header for file in shared} | plain
        sizes = {file.path: file.nbytes for file in [*shared, own.of_state.plan]}
        sizes |= {path: len(data) for path, data in plain.items()}
        sizes |= {rank_file(number): theirs["own"] for number, theirs in enumerate(found)}
        parts = contents.parts
        written_by = {
            "nonce": found[0]["nonce"],
            "world_size": self._transport.world_size,
            "stage": parts.stage.number,
            "sharding_factor": parts.shard_group.world_size,
            "collective": parts.collective.name,
            **_versions(),
        }
        if facts_of_part := ModelParts(self._optimizer).facts:
            written_by |= {"part": facts_of_part, "mark": request.mark}
        manifest = Manifest(
            request.step,
            contents.parameters(),
            tuple(groups),
            {},
            request.block_bytes,
            tuple(contents.not_saved),
            written_by,
        )
        snapshot = Snapshot(capture.staged, capture.live, all_chunks)
        return SavePlan(heads, all_chunks, sizes, snapshot, manifest)


@dataclass(frozen=True)
class _Own:
    """What one rank saves: the model and states, the param groups, its own tree, the caller's state, and the message
    for the other ranks."""

    contents: Contents
    groups: list[Any]
    tree: TreeFile
    of_state: TreeFile
    message: dict[str, Any]


def _versions() -> dict[str, str]:
    """Return the versions of this library, of torch and of Python."""
    try:
        own = importlib.metadata.version("zero-optimizer")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"zero-optimizer": own, "torch": torch.__version__, "python": platform.python_version()}


def _compare(found: list[dict[str, Any]]) -> None:
    """Raise `ValueError` naming what differs between rank 0 and another rank."""
    first = found[0]["agree"]
    for rank, theirs in enumerate(found):
        for key in {**first, **theirs["agree"]}:
            if first.get(key) != theirs["agree"].get(key):
                if not key.startswith(("state[", "the model")):
                    raise ValueError(
                        f"save(): {key} is {theirs['agree'][key]!r} on rank {rank} (host {theirs['host']}), but "
                        f"{first[key]!r} on rank 0: every rank must save the same"
                    )
                raise ValueError(
                    f"save(): {key} differs between rank 0 and rank {rank} (host {theirs['host']}): every rank must "
                    "save the same; what differs between ranks belongs in rank_state; a MicroBatchSampler needs "
                    "set_epoch(epoch + 1) on every rank after an epoch whose last step is incomplete"
                )
