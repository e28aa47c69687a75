"""The parts of one optimizer on one rank. `setup` builds them, and extends them by the parameters of param groups.

Knows: which parts there are. Does not know: how they are built, steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from collectives import Choice, Collective, Transport

from .config import Offload
from .core.buckets import MIB, BucketSizes
from .core.layout import ParameterSpec
from .core.parameter_specs import changed
from .core.rounding import STEPS, StochasticRounding, check_rounded, count_step
from .core.stage import Placement, Stage
from .gradients.reducer import Reducer
from .parameters.casting import put_casts, remove_casts
from .parameters.storage import ParameterStorage
from .precision import Precisions
from .runtime.flat_states import Options
from .runtime.joining import Joining
from .runtime.offload import OffloadBackend
from .runtime.profiler_ranges import LOG
from .runtime.streams import Streams
from .step.classes import UserOptimizers
from .step.partition import check_classes
from .step.update import Update

if TYPE_CHECKING:
    from collectives.backends.device_mesh import MeshPlace


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of one optimizer on one rank.

    Attributes:
        stage: the row of the stage table.
        module: the module that the parameters belong to, if the user gave one.
        precisions: the dtypes of each module.
        offload: which tensors are kept elsewhere.
        partition: who owns what of the parameters, for groups that do not say so.
        rounding: how weights and states are rounded to 16 bits; None: they are not.
        mesh: the place of this rank in the mesh that the user gave, if so.
        job_size: the number of processes of the job in which the group is; 0 if that is unknown.
        choice: the algorithm of the collectives, the ranks, and why it was chosen.
        reshard_group_size: how many ranks share a unit between its forward and its backward.
        bucket_sizes: the bytes of a bucket.
        offload_backend: the memory of what is offloaded.
        streams: the accelerators' streams.
        joining: whether the optimizer is inside `join`.
        user_optimizers: the user's classes.
        storage: the parameters, and the list of the buckets.
        reducer: gradients.
        update: the clip and the step.
    """

    stage: Stage
    module: nn.Module | None
    precisions: Precisions
    offload: Offload | None
    partition: str | None
    rounding: StochasticRounding | None
    mesh: MeshPlace | None
    job_size: int
    choice: Choice
    reshard_group_size: int
    bucket_sizes: BucketSizes
    offload_backend: OffloadBackend | None
    streams: Streams
    joining: Joining
    user_optimizers: UserOptimizers
    storage: ParameterStorage
    reducer: Reducer
    update: Update

    @property
    def collective(self) -> Collective:
        """The algorithm of the collectives."""
        return self.choice.collective

    @property
    def transport(self) -> Transport:
        """All ranks of the optimizer."""
        return self.choice.collective.transport

    @property
    def shard_group(self) -> Transport:
        """The ranks that share one copy of what the stage shards."""
        return self.choice.shard_group

    @property
    def offloads_parameters(self) -> bool:
        """Whether shards of parameters are in the host's memory."""
        return self.offload is not None and self.offload.parameters is not None and self.offload_backend is not None

    @property
    def steps_on_host(self) -> bool:
        """Whether the classes step them there."""
        return self.offloads_parameters and self.offload is not None and self.offload.step is not None

    @property
    def superseded(self) -> bool:
        """Whether another optimizer has taken over parameters of this one."""
        return self.reducer.hooks.superseded

    def check_rounding(self, new: Sequence[ParameterSpec], partitions: Iterable[str | None], first: int) -> None:
        """Raise `ValueError` if parameters of param groups from ``first`` on cannot be rounded. Local."""
        if self.rounding is not None:
            names = [inner.name for inner in self.user_optimizers.with_modes()]
            check_rounded(new, partitions, names, first=not first)

    def why_not_rounded(self, groups: Sequence[Options]) -> str | None:
        """Return an error text if steps are rounded and a class fails a trial with options that were changed. Local.

        A class may keep other states then, and the shape of a parameter without dimensions, or of one with an owner,
        does not tell which states are as large as it.
        """
        if self.rounding is None or self.user_optimizers.were_tried(groups):
            return None
        try:
            names = check_classes(self.user_optimizers, groups, self.storage.layout.parameters)
        except ValueError as error:
            return str(error)
        self.user_optimizers.note_trial(groups, 0, names)
        return None

    @property
    def counted_steps(self) -> set[str]:
        """The key of param groups that counts their steps, if steps are rounded. Ranks compare it as an option."""
        return set() if self.rounding is None else {STEPS}

    def count_step(self, groups: Sequence[Options]) -> None:
        """Count a step of these param groups, if steps are rounded."""
        if self.rounding is not None:
            count_step(groups)

    def cast_problem(self) -> str | None:
        """Return an error text if the whole model was cast or moved since construction, else None.

        Only the first parameter is inspected: it changes with the whole model. At stage 3 `diagnose` finds a cast, and
        a compiler could not trace a use of a released parameter.
        """
        if self.stage.parameters is Placement.SHARD:
            return None
        return changed(self.storage.parameters[0], self.storage.layout.parameters[0])

    def cast_at_borders(self) -> None:
        """Cast inputs and outputs of modules from now on, as their precisions ask for it."""
        if self.module is not None:
            remove_casts(self.module, self)  # also the hooks of an optimizer that this one replaces
            for border in self.precisions.borders:
                put_casts(border, self)

    def cast_inside(self) -> None:
        """Cast at the modules inside of the module, too, which a trainer calls outside of the module's forward."""
        self.precisions.inside = True
        self.cast_at_borders()

    def make_plain(self) -> None:
        """Make the model plain again. Collective."""
        if self.module is not None:
            remove_casts(self.module, self)
        self.reducer.close()
        self.storage.make_plain()
        if self.offload_backend is not None:
            self.offload_backend.close()

    def log_choices(self) -> None:
        """Write one line at INFO: the choices that were made for this optimizer, and their reasons."""
        if not LOG.isEnabledFor(logging.INFO):
            return
        units = self.storage.units() or {}
        LOG.info(
            "%s of %d: stage %d, %s, %d buckets of at most %s, %d units, sharding factor %d, collective %s (%s), "
            "common memory: %s, offload: %s",
            self.transport.rank_label,
            self.transport.world_size,
            self.stage.number,
            self.user_optimizers.names(),
            len(self.storage.layout.buckets),
            f"{self.bucket_sizes.most / MIB:.4g} MiB",
            len(set(units.values())),
            self.shard_group.world_size,
            self.collective.name,
            self.choice.reason,
            self.storage.common_memory(),
            "none" if self.offload is None else self.offload.kind,
        )
