"""`zero.save` and `zero.load`: one checkpoint at a path, without a folder of steps.

Knows: the two public calls. Does not know: how a save or a load works, locks, which checkpoints are kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..optimizer import ZeroOptimizer
from ..runtime.compiled_calls import untraced
from .options import check_step, parse_size, read_assets, warn_caller
from .read.restorer import Reshard, Restored, Restorer
from .visibility import check_visible
from .write.one_path import OnePath
from .write.save_thread import Saving
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
    """Save one checkpoint at ``path``, and return when it is complete. All ranks; see `CheckpointManager.save`.

    Raises `ValueError` also if a rank does not see the folder of ``path``.
    """
    target = Path(path).absolute()
    if optimizer.world_size > 1:
        check_visible(optimizer, target.parent, None)
    problem: Exception | None = None
    files: dict[str, bytes] = {}
    max_bytes = 0
    try:
        check_step(step)
        max_bytes, files = parse_size(max_shard_size), read_assets(assets)
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
        assets=files,
        problem=problem,
    )
    return save_one(optimizer, request)


def save_one(optimizer: ZeroOptimizer, request: SaveRequest) -> Saving:
    """Save one checkpoint. All ranks; see `save`."""
    saver = Saver(optimizer.engine, lambda: optimizer.param_groups)
    destination = OnePath(request.target, overwrite=request.overwrite) if optimizer.rank == 0 else None
    saving = saver.save(request, destination)
    assert saving is not None, "no rank skips it"
    for why in optimizer.exchange(saving.known_cause().encode()):  # every rank has seen how it ended
        if why:
            saving.learn(why.decode())
    saver.withdraw()
    saving.remove_rest()
    saving.result()
    for remark in saving.remarks:
        warn_caller(remark)
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
) -> Restored:
    """Load the checkpoint at ``path``. All ranks; see `CheckpointManager.restore`."""
    restorer = Restorer(optimizer, state, rank_state, optimizer_too=with_states, rng=rng, reshard=reshard)
    return restorer.load([(Path(path).absolute(), None)], fall_back=False)
