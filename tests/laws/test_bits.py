"""The plain loop's bits after every command, the formulas' bytes, and nothing left behind: pairs of values of dials."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ..dials import DIALS
from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.program import Describe
from ..support.machine.ranks import Rank
from ..support.machine.run import run
from ..support.pairs import Row
from ..support.rows import only
from .space import ROWS, named, program_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set aside:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph"),
    pytest.mark.usefixtures("copied_from_the_host"),
]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that a block leaves no optimizer, thread or open file."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    before = {id(optimizer) for optimizer in Rank.built}  # of tests that failed
    yield
    gc.collect()
    assert {id(optimizer) for optimizer in Rank.built} <= before
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


LISTED = {  # what differs from the usual row; killers of `tests.zoo` are named by these
    "adamw at stage 2": {},
    "adamw at stage 0": {"stage": "0", "ranks": "2", "bucket_cap_mb": "1e-06"},
    "sgd at stage 1": {"class": "sgd", "stage": "1"},
    "sgd at stage 2": {"class": "sgd"},
    "sgd in small buckets": {"class": "sgd", "bucket_cap_mb": "1e-06"},
    "sgd at stage 3": {"class": "sgd", "stage": "3"},
    "adamw fused": {"class": "adamw fused"},
    "norms at stage 0": {"loop": "norms", "stage": "0"},
    "norms at stage 2": {"loop": "norms"},
    "no sync": {"loop": "no sync"},
    "no sync alone": {"loop": "no sync", "ranks": "1"},
    "uneven": {"loop": "uneven"},
    "cleared": {"loop": "clears, zeros", "class": "sgd momentum"},
    "cleared at stage 0": {"loop": "clears, another's zeros", "stage": "0", "bucket_cap_mb": "1e-06"},
    "joined on the host": {"loop": "joined", "stage": "3", "offload": "stepped on the host", "mixed_precision": "bf16"},
    "several at stage 0": {"loop": "several", "stage": "0"},
    "scaled at stage 0": {"loop": "scaled", "stage": "0"},
    "scaled": {"loop": "scaled", "ranks": "2", "stage": "1"},
    "kept": {"loop": "kept", "stage": "3"},
    "fails": {"loop": "fails", "stage": "3"},
    "edits": {"loop": "edits", "stage": "3", "mixed_precision": "bf16"},
    "evaluates": {"loop": "evaluates", "stage": "3"},
    "divisors": {"loop": "divisors", "stage": "1"},
    "replaces at stage 0": {"loop": "replaces", "stage": "0"},
    "replaces at stage 3": {"loop": "replaces", "stage": "3", "mixed_precision": "bf16"},
    "several": {"loop": "several", "stage": "3"},
    "losses at stage 1": {"loop": "losses", "stage": "1", "mixed_precision": "bf16"},
    "losses at stage 3": {"loop": "losses", "stage": "3"},
    "rounded at stage 1": {"stage": "1", "mixed_precision": "bf16", "rounding": "rounded"},
    "rounded at stage 3": {"stage": "3", "mixed_precision": "in bf16", "rounding": "rounded"},
    "rounded on the host": {
        "stage": "3",
        "mixed_precision": "in bf16",
        "rounding": "rounded",
        "offload": "stepped on the host",
    },
    "rounded with two classes": {"mixed_precision": "bf16", "rounding": "rounded", "groups": "of two classes"},
    "an option adds a state": {
        "class": "sgd",
        "loop": "an option adds a state",
        "mixed_precision": "bf16",
        "rounding": "rounded",
        "cut": "some",
    },
    "bf16 at stage 0": {"stage": "0", "loop": "no sync", "mixed_precision": "bf16", "ranks": "2"},
    "made in bf16": {"loop": "no sync", "mixed_precision": "bf16, made in bf16"},
    "two dtypes are scaled": {"loop": "scaled", "mixed_precision": "of two dtypes"},
    "fails by kind": {"loop": "fails", "stage": "3", "mixed_precision": "by kind", "groups": "not all"},
    "stacks are averaged": {"look": "average", "cut": "stacks"},
    "replicas of one": {"stage": "1", "ranks": "2", "sharding_factor": "1"},
    "averaged at stage 0": {"look": "average", "stage": "0", "ranks": "2"},
    "averaged at stage 3": {"look": "average", "stage": "3", "mixed_precision": "bf16"},
    "averaged in common memory": {"look": "average", "stage": "3", "memory": "of one host", "ranks": "4"},
    "modes at stage 2": {"look": "modes", "class": "schedule-free", "loop": "freezes"},
    "modes at stage 3": {"look": "modes", "class": "averaged", "stage": "3", "mixed_precision": "bf16"},
    "reset at stage 3": {"look": "reset", "class": "adagrad", "stage": "3"},
    "rolled back": {"look": "rolled back", "stage": "1"},
}
USUAL = {dial.name: dial.usual for dial in DIALS}


@pytest.mark.law("loss scale")
@pytest.mark.law("memory")
@pytest.mark.law("no traces")
@pytest.mark.law("norm and overflow")
@pytest.mark.law("requested dtypes")
@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param({**USUAL, **LISTED[name]}, id=name) for name in only(LISTED, *[*LISTED][::9])),
        *(pytest.param(row, id=named(row)) for row in ROWS),
    ],
)
def test_programs_give_the_bits_of_the_plain_loop(row: Row) -> None:
    config, commands = program_of(row)
    with nothing_left():
        run(config, *commands, Describe(exact=True), backend=ThreadsOnHosts())
