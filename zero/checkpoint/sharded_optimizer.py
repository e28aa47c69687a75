"""What checkpoints ask of an optimizer: all of it is here, and nothing else of the package knows an engine.

Knows: which of an optimizer's parts a save and a load use. Does not know: files, what is made of the parts.
"""

from __future__ import annotations

from ..optimizer import ZeroOptimizer
from ..runtime.flat_states import Options


class ShardedOptimizer:
    """An optimizer as it is now, on one rank. It is asked for anew at each save and each load.

    Attributes:
        stage: which stage it is.
        place: this rank's place in the mesh that the user gave; None without one.
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

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        """Local. Raises `TypeError` for what is no `ZeroOptimizer`."""
        if not isinstance(optimizer, ZeroOptimizer):
            raise TypeError(f"a ZeroOptimizer is needed, whose states are saved, not a {type(optimizer).__name__}")
        engine = optimizer._engine
        parts = engine.parts
        self.stage, self.module, self.storage = parts.stage, parts.module, parts.storage
        self.place = parts.mesh
        self.classes = parts.user_optimizers
        self.groups: list[Options] = optimizer.param_groups
        self.averages, self.watchers = engine.averages, engine.watchers
        self.transport, self.shard_group, self.collective = parts.transport, parts.shard_group, parts.collective
        self.check, self.report = engine.check, parts.reducer.agreement.report
        self.agree_to_save, self.agree_to_load, self.load = engine.agree_to_save, engine.agree_to_load, engine.load
