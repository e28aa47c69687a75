"""The bytes of a rank by kind, exactly as `optimizer.describe()` reports them after a step, without a training; and
those that a step sends, as `optimizer.traffic` counts them.

Buckets of equal slots have equal bytes, so each kind of bucket is counted once. Of W ranks that share a copy, the last
one owns the largest slice of every bucket: with n blocks of the alignment, rank r owns floor(n (r + 1) / W) -
floor(n r / W) of them, which is ceil(n / W) for r = W - 1 and never more. On accelerators slices are equal, but the
last ones may be padding alone. So no loop over ranks finds the largest. Of parameters with one owner each (Muon's), the
rank that owns most has most.

Knows: what a class keeps, and what is offloaded. Does not know: the bytes of a bucket (`zero.core.formulas`),
activations, the memory that torch and the system need, seconds, which bytes cross between hosts (`seconds.compute`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import cast

import torch

from ..core.buckets import build
from ..core.formulas import BucketBytes, KeptStates, bucket_bytes, formula_traffic, peak_bounds
from ..core.grain import BY_BLOCK, BY_ELEMENT, WHOLE
from ..core.layout import BlockCuts, BucketSpec, Layout, OwnerCuts, ParameterSpec, is_accelerator
from ..core.rounding import WIDE, RoundedDtypes, rounded
from ..core.stage import STATES_AHEAD, STATES_BEHIND
from ..core.units import ROOT
from ..precision import Rule
from .model import Model, ParameterShape
from .setting import STEP_COUNT_BYTES, PlanSetting

_STAGED = {"": 0, "disk": STATES_AHEAD + 1, "host": STATES_AHEAD + 1 + STATES_BEHIND}
"""Buckets of offloaded states in memory during a step: memory/offload.md. A file has no copies to write back."""


@dataclass(frozen=True)
class RankBytes(BucketBytes):
    """The bytes of one rank after a step with all gradients. Those of `BucketBytes` are exact.

    Attributes:
        offloaded: memory in a file or on the host that is reserved for these.
        resident: those of `BucketBytes` that are beside the model.
        gathered_peak: upper bound of the buffers of gathered units.
        scratch_peak: upper bound of the memory for buckets in flight.
        staged_peak: upper bound of what is in memory of offloaded tensors during a step.
    """

    offloaded: int
    resident: int
    gathered_peak: int = 0
    scratch_peak: int = 0
    staged_peak: int = 0

    @property
    def optimizer(self) -> int:
        """What `describe()` reports as "optimizer"."""
        return self.states + self.scalars + self.masters


@dataclass(frozen=True)
class LaidOut:
    """A model laid out for the ranks that share a copy.

    Attributes:
        layout: all buckets.
        kinds: a bucket of each kind, and how many there are. A bucket whose parameters have one owner each is a kind.
    """

    layout: Layout
    kinds: tuple[tuple[BucketSpec, int], ...]


class MemoryPlan:
    """The bytes of a model's ranks under any number of settings. Layouts are kept, since settings share them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._laid_out: dict[object, LaidOut] = {}

    def of_rank(self, setting: PlanSetting, rank: int) -> RankBytes:
        """Return the bytes of one rank."""
        if not 0 <= rank < setting.world_size:
            raise ValueError(f"rank must be from 0 to {setting.world_size - 1}, not {rank}")
        return self._sum(setting, rank % setting.factor)

    def of_largest(self, setting: PlanSetting) -> RankBytes:
        """Return the bytes of the rank that holds most: the last one, since its slice of each bucket is the largest;
        on accelerators the first one, since slices are equal and the last may be padding. If parameters have one owner
        each, or are cut between blocks, it is the last rank among those that hold most of them.

        Another rank may have more step counts, of `STEP_COUNT_BYTES` each: its slices may cross more parameters. If
        some parameters are unused, another rank may have more states. If some have one owner each, another rank's
        slices of the other buckets may be longer, by an alignment each.
        """
        held: Counter[int] = Counter()
        largest = 0 if is_accelerator(setting.device) else setting.factor - 1
        for bucket, count in self.laid_out(setting).kinds:
            in_blocks = bucket.world_size if isinstance(bucket.cuts, BlockCuts) else 0
            for place in bucket.cuts.owners if isinstance(bucket.cuts, OwnerCuts) else range(in_blocks):
                found = self._of_bucket(setting, bucket, place)
                held[place] += count * (found.resident + found.offloaded)
        return self._sum(setting, max(held, key=lambda place: (held[place], place), default=largest))

    def laid_out(self, setting: PlanSetting) -> LaidOut:
        """Return the model's layout, as `zero.ZeroOptimizer` would make it."""
        across_units, sizes = setting.has_units and setting.shares_buckets, setting.bucket_sizes
        on_host = setting.offloads_parameters, setting.steps_on_host
        made = setting.mixed_precision, setting.classes, setting.rounding, setting.device, *on_host
        key = made, setting.factor, sizes, setting.has_units, across_units
        if key not in self._laid_out:
            specs = self._specs(setting)
            layout = build(specs, setting.factor, sizes.most, first_bytes=sizes.first, across_units=across_units)
            seen: dict[object, BucketSpec] = {}
            counts: Counter[object] = Counter()
            for bucket in layout.buckets:
                members = self.members(bucket)
                facts = tuple((p.numel, p.shape == (), p.group, p.used, p.trainable) for p in members)
                shape = (facts, bucket.dtypes, bucket.index if isinstance(bucket.cuts, OwnerCuts) else None)
                seen.setdefault(shape, bucket)
                counts[shape] += 1
            kinds = tuple((seen[shape], count) for shape, count in counts.items())
            self._laid_out[key] = LaidOut(layout, kinds)
        return self._laid_out[key]

    def _specs(self, setting: PlanSetting) -> list[ParameterSpec]:
        """Return the parameters as `zero.ZeroOptimizer` over the module would describe them."""
        quantized, specs = setting.quantized, []
        for index, (shape, dtypes) in enumerate(
            zip(self.model.parameters, self.model.dtypes(cast(Rule, setting.mixed_precision)), strict=True)
        ):
            of_muon = len(setting.classes) > 1 and shape.is_unit_matrix
            grain = WHOLE if of_muon or quantized is not None else BY_ELEMENT
            if quantized is not None and quantized.is_cut(shape.numel):
                grain = BY_BLOCK
            specs.append(
                ParameterSpec(
                    shape.names,
                    shape.shape,
                    torch.empty(shape.shape, device="meta").stride(),
                    dtypes if setting.rounding is None else rounded(dtypes),
                    setting.device,
                    shape.trainable,
                    shape.group,
                    index,
                    unit=shape.unit if setting.has_units else ROOT,
                    optimizer_class=int(of_muon),
                    grain=grain,
                    offloaded=setting.offloads_parameters,
                    stepped_on_host=setting.steps_on_host,
                )
            )
        return specs

    def sent(self, setting: PlanSetting, backwards: int = 1, synchronised: int = 1) -> int:
        """Return the payload of a step, summed over the ranks, if each of them sends what an owner needs to that owner.

        That is so for ranks that share a host, for threads, for hosts of one rank each, and for sums that are folded.
        If no parameter of the first units is trained, a backward does not gather these units, and less is sent.

        Args:
            setting: the optimizer's arguments.
            backwards: the backwards of each rank in the step, each after one forward.
            synchronised: how many of them are outside ``no_sync``.
        """
        layout = self.laid_out(setting).layout
        whole = formula_traffic(
            layout,
            setting.row,
            backwards,
            synchronised,
            units_need_gather=setting.gathers_units,
            means_are_shown=setting.shows_means,
            replicas=setting.replicas,
            reshard_group_size=setting.near,
            schedule=setting.unit_schedule(len(self.model.units)),
            hosts=setting.folded_hosts,
        )
        if not setting.row.parameters_are_gathered:
            return whole
        unused = 0
        for bucket in layout.buckets:
            members = self.members(bucket)
            if members[0].trainable and not any(member.used for member in members):
                unused += bucket.numel * bucket.dtypes.param_dtype.itemsize
        return whole - unused * (setting.factor - 1) * setting.replicas

    def members(self, bucket: BucketSpec) -> list[ParameterShape]:
        """Return the parameter of each slot of a bucket."""
        return [self.model.parameters[slot.parameter] for slot in bucket.slots]

    def _sum(self, setting: PlanSetting, place: int) -> RankBytes:
        """Return the bytes of a rank. ``place``: its number among those that share a copy."""
        laid_out = self.laid_out(setting)
        parts_ = [(self._of_bucket(setting, bucket, place), n) for bucket, n in laid_out.kinds]
        total = {
            field.name: sum(count * getattr(part, field.name) for part, count in parts_) for field in fields(RankBytes)
        }
        staged = max((part.staged_peak for part, _ in parts_), default=0)
        # peers read a rank's shards in its memory
        mapped = setting.threads or (setting.device == "cpu" and (setting.per_host > 1 or setting.replicas > 1))
        total |= peak_bounds(
            laid_out.layout,
            setting.row,
            reshard_group_size=setting.near,
            schedule=setting.unit_schedule(len(self.model.units)),
            shards_are_exposed=setting.gathers_units and mapped,
            host_ranks=setting.per_host if setting.folded_hosts > 1 else 0,
        )
        if not setting.gathers_units:
            total["gathered_peak"] = 0
        total["staged_peak"] = _STAGED[setting.states_on] * staged
        if setting.offloads_parameters or setting.rounding:  # and what the bucket that is stepped has besides
            total["staged_peak"] += max((part.scratch_peak for part, _ in parts_), default=0)
        return RankBytes(**total)

    def _of_bucket(self, setting: PlanSetting, bucket: BucketSpec, place: int) -> RankBytes:
        """Return a rank's bytes of one bucket. ``staged_peak``: of its copies in a step; ``scratch_peak``: of its
        gradient and of fp32 copies there."""
        members, stage, itemsize = self.members(bucket), setting.row, bucket.dtypes.itemsize("master_dtype")
        states = setting.classes[len(setting.classes) > 1 and members[0].is_unit_matrix]
        trainable = members[0].trainable
        stepped = [member.used and trainable for member in members]
        low, high = stage.update_interval(bucket, place)
        pieces = bucket.pieces(low, high)
        updated = [piece for piece in pieces if stepped[piece.slot]]
        bits = states.quantized
        flat = [piece for piece in updated if bits is None or not bits.fits(members[piece.slot].numel)]
        exist = bool(flat) or (states.at_construction and bool(pieces))
        in_blocks = sum(states.tensors * bits.nbytes(piece.numel) for piece in updated if bits and piece not in flat)
        found = bucket_bytes(
            bucket,
            [self.laid_out(setting).layout.parameters[slot.parameter] for slot in bucket.slots],
            stage,
            place,
            KeptStates(
                states.tensors * itemsize if exist else 0,
                bucket.dtypes.has_master and trainable,
                states.step_counts * STEP_COUNT_BYTES,
                stepped,
                () if setting.fused else {member.group for member in members},
            ),
        )
        masters_move = setting.states_on == "disk" and not bucket.on_accelerator
        has_room = trainable or exist or setting.states_on == "disk"
        room = (high - low) * itemsize if has_room else 0  # of a tensor that is kept there
        offloaded = states.tensors * room if setting.offload else 0
        offloaded += room if masters_move and bucket.dtypes.has_master else 0
        kept, wide = found.gradients + found.parameters, 0
        staged = offloaded
        scalars = found.scalars
        if setting.offloads_parameters:
            staged, wide = (offloaded + room, room) if trainable and not setting.steps_on_host else (0, 0)
            offloaded += kept + found.masters
            kept = 0
        if isinstance(bucket.dtypes, RoundedDtypes) and any(stepped) and not setting.steps_on_host:
            copied = 1 + states.tensors + (bucket.dtypes.accumulate_dtype is not WIDE)  # in fp32, perhaps the gradient
            wide += copied * (high - low) * WIDE.itemsize
        if setting.steps_on_host:
            offloaded, scalars = offloaded + scalars, 0
        beside = kept + scalars + (0 if setting.offload else found.states + in_blocks)
        beside += 0 if masters_move or setting.offloads_parameters else found.masters
        exact = vars(replace(found, states=found.states + in_blocks))
        return RankBytes(**exact, offloaded=offloaded, resident=beside, scratch_peak=wide, staged_peak=staged)
