"""`zero.save` and `zero.load`: one checkpoint at a path, without a folder of steps: no lock, and nothing older to keep.

Knows: the two public calls. Does not know: how a save or a load works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.parameter_specs import Rename
from ..optimizer import ZeroOptimizer
from ..runtime.compiled_calls import untraced
from .folder.directory import check_visible
from .folder.model_parts import ModelParts
from .options import check_step, parse_size, read_assets, warn_caller
from .read.loader import Differences, Resize
from .read.restorer import Reshard, Restored, Restorer
from .write.save_thread import Destination, Saving
from .write.saver import Saver, SaveRequest


@untraced
def save(
    path: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    *,
    step: int = 0,
    overwrite: bool = False,
    max_shard_size: str | int = "5GB",
    assets: str | os.PathLike[str] | None = None,
) -> Saving:
    """Save one checkpoint at ``path``, and return when it is complete. All ranks, with equal arguments.

    Args:
        path: the checkpoint's folder. Missing parent folders are created; all ranks must see them.
        optimizer: the optimizer whose parameters and states are saved.
        state, rank_state, overwrite: as in `CheckpointManager.save`.
        step: the checkpoint's number, at least 0.
        max_shard_size, assets: as in `CheckpointManager`.

    Returns:
        The complete save, with its bytes and times.

    Raises:
        ValueError: a rank does not see the folder. Further errors are those of `CheckpointManager.save`.
        FileExistsError: ``path`` has a checkpoint, and ``overwrite`` is not set, or it has other files. On ranks other
            than 0 the error is a `RuntimeError`.
    """
    target = ModelParts(optimizer).folder(Path(path).absolute())
    problem: Exception | None = None
    unusable = ValueError(f"path is {str(target)!r}, which no checkpoint can have as its name: name a folder inside it")
    in_parts = check_visible(optimizer, target.parent, unusable if target.name in ("", "..") else None)
    copied: dict[str, bytes] = {}
    max_bytes = 0
    try:
        check_step(step)
        max_bytes, copied = parse_size(max_shard_size), read_assets(assets)
    except (ValueError, OSError) as error:
        problem = error
    request = SaveRequest(
        target,
        step,
        state,
        rank_state,
        overwrite=overwrite,
        blocking=True,
        max_shard_bytes=max_bytes,
        assets=copied,
        in_parts=in_parts,
        problem=problem,
    )
    return save_one(optimizer, request)


def save_one(optimizer: ZeroOptimizer, request: SaveRequest) -> Saving:
    """Save one checkpoint. All ranks; see `save`."""
    saving = Saver(optimizer).save(request, Destination() if optimizer.rank == 0 else None)
    saving.settle(optimizer.exchange(saving.outcome()))
    saving.remove_rest()
    saving.result()
    for text in saving.news():
        warn_caller(text)
    return saving


@untraced
def load(
    path: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    state: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    *,
    with_states: bool = True,
    rng: bool = True,
    reshard: Reshard | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    resize: Resize | None = None,
) -> Restored:
    """Load the checkpoint at ``path``, saved at any stage and number of ranks. All ranks, between two steps.

    Args:
        path: the folder of the checkpoint.
        optimizer: the optimizer that receives the parameters and states.
        with_states: also load the states and the options of the param groups; False: the model only.
        state, rank_state, rng, reshard, strict, rename, resize: as in `CheckpointManager.restore`, which has the
            errors, too.

    Returns:
        What was restored.
    """
    allowed = Differences(strict, rename, resize)
    restorer = Restorer(
        optimizer, state, rank_state, optimizer_too=with_states, rng=rng, reshard=reshard, allowed=allowed
    )
    return restorer.load([(restorer.parts.folder(Path(path).absolute()), None)], fall_back=False, purpose="zero.load()")
