"""What checkpoints ask of an optimizer: all of it is here, and nothing else of the package knows an engine.

Knows: which of an optimizer's parts a save and a load use. Does not know: files, what is made of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass

from torch import nn

from collectives import Collective, Transport

from ..core.stage import Stage
from ..optimizer import ZeroOptimizer
from ..parameters.storage import ParameterStorage
from ..runtime.flat_states import Options
from ..state.average import Averages
from ..step.classes import UserOptimizers
from ..step.update import UpdateListener


@dataclass(frozen=True)
class ShardedOptimizer:
    """An optimizer as it is now, on one rank. It is asked for anew at each save and each load.

    Attributes:
        stage: which stage it is.
        module: the model; None if it was built from parameters alone.
        storage: the parameters and their buckets, with what this rank holds of them.
        classes: the `torch.optim` classes, by param group and by number.
        groups: the live param groups.
        averages: its `ShardedAverage` objects.
        transport: all ranks; ``shard_group``: those that share one copy; ``collective``: what gathers among these.
        watchers: the live list of those that hear of each step, and of each update of a bucket.
        check: raises unless the optimizer can be used. Local.
        report: lets all ranks have a text, under a name, in their next step; None withdraws it. Local.
        agree_to_save: exchanges messages, or raises the same error on every rank: `Engine.agree_to_save`.
        agree_to_load: returns if all ranks may load: `Engine.agree_to_load`.
        load: lets a function overwrite parameters and states: `Engine.load`.
    """

    stage: Stage
    module: nn.Module | None
    storage: ParameterStorage
    classes: UserOptimizers
    groups: list[Options]
    averages: Averages
    transport: Transport
    shard_group: Transport
    collective: Collective
    watchers: MutableSequence[UpdateListener]
    check: Callable[[], None]
    report: Callable[[str, str | None], None]
    agree_to_save: Callable[[str | None, bytes], list[bytes]]
    agree_to_load: Callable[[str], None]
    load: Callable[[Callable[[], None]], None]


def sharded_optimizer_of(optimizer: ZeroOptimizer) -> ShardedOptimizer:
    """Return what checkpoints ask of an optimizer. Local."""
    engine = optimizer._engine
    parts = engine.parts
    return ShardedOptimizer(
        parts.stage,
        parts.module,
        parts.storage,
        parts.user_optimizers,
        optimizer.param_groups,
        engine.averages,
        parts.transport,
        parts.shard_group,
        parts.collective,
        parts.update.watchers,
        engine.check,
        parts.reducer.agreement.report,
        engine.agree_to_save,
        engine.agree_to_load,
        engine.load,
    )
