"""Gives the ranks of a group a ledger, a board and a sentinel each, if their collectives stay on devices.

`ZERO_CHECK_EACH=1` in the environment of all ranks keeps the awaited header of each collective instead. So does a group
without a board.

Knows: transports, and what opens a board. Does not know: what is launched.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from .launches.ledger import Launches
from .launches.sentinel import SENTINEL, Post
from .messages import Kind, Tag
from .transport import Transport

_NOTHING = nullcontext()

CHECK_EACH = "ZERO_CHECK_EACH"
_OPENING = Tag(Kind.EXCHANGE, f"opening the sentinels' board: {CHECK_EACH} is 1 on all ranks or on none")


def watch(transport: Transport, sharing: int, device: torch.device) -> None:
    """Note launches from now on, if collectives of a device stay there, and let a sentinel watch them. Collective.

    ``sharing``: how many neighbouring ranks share one copy of what is gathered.
    """
    backend, links, size = transport.backend, transport.links, transport.world_size
    if size == 1 or transport.launches is not None or not (backend.has_collectives and backend.stays_on(device)):
        return
    if os.environ.get(CHECK_EACH) == "1":
        return
    problem, launches = "", Launches(links, sharing)
    post = Post(launches, backend.board())
    try:
        post.open()
    except (AttributeError, RuntimeError) as error:
        problem = f"{transport.rank_label}: {error}"
    problems = [data.decode(errors="replace") for data in transport.exchange(problem.encode(), _OPENING) if data]
    if problems:
        if transport.rank == 0:
            text = f"no board for the sentinels ({problems[0]}): each collective on devices awaits all ranks' headers"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    links.watch(launches)
    SENTINEL.watch(post)


def behind_a_meeting(transport: Transport) -> AbstractContextManager[None]:
    """Return the context for collectives that follow a meeting in the same call. All ranks enter it, or none."""
    return _NOTHING if transport.launches is None else transport.launches.behind_a_meeting()
