"""`ZeroOptimizer`: the public face.

Knows: what a call means, and what ranks agree on before it. Its parts do the work: `assembly` (how parameters are taken
in), `storage` and `sharded` (where they lie), `reducer` (gradients to means), `update` (clip and step), `inner` (the
user's class), `checkpoint` (plain dicts).
"""

from __future__ import annotations

import copy
import json
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from collectives import Algorithm, CollectiveError, Kind, Tag, Traffic, Transport

from .consistency import compare, gather_slot
from .core.parameter_specs import as_groups, check_listed_once, device_of, members_of, with_names
from .core.stages import Placement, stage_of
from .core.units import Predicate
from .events import LOG, Event
from .gradients.join import Call, adopt_options, digests_of
from .parameters.materialize import InitFunction, StateDict, landing, materializer_of
from .setup import Assembly, backend_of
from .state import plain_dicts as checkpoint
from .state.describe import Description, describe
from .step.clip import check_norm_arguments
from .step.elementwise import check_elementwise
from .step.inner import InnerOptimizer
from .step.master_weights import MixedPrecision
from .step.offload import Offload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TAKEN_OVER = "a newer ZeroOptimizer took over parameters of this one"


class ZeroOptimizer(torch.optim.Optimizer):
    """A `torch.optim` class whose states, gradients and parameters are sharded over the ranks of a group.

    Called by all ranks alike, like every method here that is not said to be local. After construction every rank has
    group rank 0's parameters and buffers.

    Args:
        params: an ``nn.Module``, parameters, (name, parameter) pairs, or torch.optim param groups.
        optimizer_class: any element-wise `torch.optim` class; the path that it takes (for-loop, ``foreach``,
            ``fused``) is the one that it would take alone.
        stage: 0 replicates (as DDP does); 1 shards optimizer states; 2 also gradients; 3 also parameters, those of
            the module that are not listed included. Frozen ones that are no plain fp64, fp32, bf16 or fp16 tensors
            (a quantised base) stay whole on every rank.
        module: the module that the parameters belong to, where ``params`` is not one: it gives names, the order of
            registration, and buffers. Stage 3 needs it.
        process_group: a torch process group or a `collectives.Transport`; default: the world, or one rank alone where
            no group is initialised.
        divisor: what a summed gradient is divided by; None: the number of ranks, as in DDP.
        bucket_cap_mb: size of a bucket in MiB, as in DistributedDataParallel.
        collective: an algorithm of `collectives`, by name or as a class; default: the fastest for where the ranks and
            the parameters are, which `describe` names, with the reason.
        sharding_factor: how many ranks share one copy of what the stage shards; a divisor of their number, which is the
            default. Others hold the same: ranks 0 to F - 1 are one replica, F to 2F - 1 the next, so that with F ranks
            a host all gathers stay inside it. 1 shards nothing, as DDP. The bits are the same.
        reshard_after_forward: at stage 3, what stays of a unit between its forward and its backward: True nothing but
            this rank's slice; False the whole, so that the backward gathers nothing; a number, so many neighbouring
            ranks share it, and the backward gathers among them (those of a host, say).
        offload: what is kept on disk, or in the host's memory where the parameters are on a GPU; see `Offload`.
        param_init_fn: for a model that was built under ``torch.device("meta")``: called with each module that has
            tensors of its own there, in order of registration, when these have memory; default: its
            ``reset_parameters()``. At stage 3 a unit is sharded before the next one gets memory.
        init_state_dict: for such a model, values by name: a mapping, read tensor by tensor, or the path of a
            safetensors file, or several. Names and shapes must be the model's, unless ``param_init_fn`` says what is
            missing; what has values already gets those that are there for it, too.
        mixed_precision: compute in 16 bits, with fp32 master weights at their owners; see `MixedPrecision`. The
            parameters become 16-bit ones; ``p.grad`` is then a placeholder at stage 0, too (`full_grad` reads).
        units: at stage 3, which modules are gathered as a whole, each just before its forward and its backward:
            module -> bool. Default: the children of the outermost ``ModuleList`` and ``Sequential`` modules.
        defaults: arguments of ``optimizer_class``.

    Raises:
        ValueError, TypeError: an argument or a parameter that cannot be; the message names it. Ranks that built
            different models get the first difference, on every rank.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        stage: int = 2,
        module: nn.Module | None = None,
        process_group: ProcessGroup | Transport | None = None,
        divisor: float | None = None,
        bucket_cap_mb: float = 25.0,
        collective: str | Algorithm = "auto",
        sharding_factor: int | None = None,
        reshard_after_forward: bool | int = True,
        offload: Offload | None = None,
        param_init_fn: InitFunction | None = None,
        init_state_dict: StateDict | None = None,
        mixed_precision: MixedPrecision | None = None,
        units: Predicate | None = None,
        **defaults: Any,
    ) -> None:
        self._built = False
        self._closed = ""  # why nothing can be done any more
        self._stage = stage_of(stage)
        given = params if isinstance(params, nn.Module) else None
        if module is not None and given is not None and module is not given:
            raise ValueError("params and module are two different modules")
        self._module = given if given is not None else module
        if not isinstance(mixed_precision, MixedPrecision | None):
            raise TypeError(f"mixed_precision must be a zero.MixedPrecision, not {mixed_precision!r}")
        if not isinstance(offload, Offload | None):
            raise TypeError(f"offload must be a zero.Offload, not {offload!r}")
        self._inner = InnerOptimizer(optimizer_class, defaults)
        groups = as_groups(params)
        land = partial(landing, partial(backend_of, process_group))
        device = device_of(groups)
        if device.type == "meta":
            device = land()
        listed = [entry[1] if isinstance(entry, tuple) else entry for group in groups for entry in group["params"]]
        parts = Assembly(
            self._stage,
            self._module,
            self._inner,
            process_group,
            bucket_cap_mb,
            collective,
            device,
            units,
            mixed_precision,
            sharding_factor,
            reshard_after_forward,
            offload,
            lambda: materializer_of(self._module, listed, param_init_fn, init_state_dict, land),
        )
        self._assembly, self._transport, self._collective = parts, parts.transport, parts.collective
        self._storage, self._reducer, self._update = parts.storage, parts.reducer, parts.update
        self._consolidated: tuple[dict[int, Any], dict[int, Tensor]] | None = None  # states, master weights
        check_listed_once(groups, self._module)
        super().__init__(groups, self._inner.defaults)
        self.state: Any = checkpoint.States(self._storage, self._inner)
        self._stepping, self._clipping = (
            Event("step", self._transport.rank_label),
            Event("clip", self._transport.rank_label),
        )
        parts.adopt(self.param_groups, 0)
        self._counted: set[str] = set()  # options that the class changes itself, perhaps only where it steps something
        self._followed: list[AbstractContextManager[None]] = []  # blocks of others, inside `join`
        self._built = True
        self.divisor = self._transport.world_size if divisor is None else divisor
        parts.log_choices()

    # -- construction -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of further parameters, in buckets of their own. All ranks."""
        if not getattr(self, "_built", False):
            super().add_param_group(param_group)
            return
        self._check()
        if self._reducer.hooks.inside_backward or self._reducer.joining:
            raise RuntimeError("add_param_group() inside a backward or inside join(): leave it first")
        if not self._storage.retire():
            raise RuntimeError("add_param_group() inside gathered() or inside a forward: leave it first")
        group = dict(param_group)
        group["params"] = members_of(group["params"], "param_group['params']")
        names = {spec.index: spec.name for spec in self._storage.listed()}
        before = [parameter for g in self.param_groups for parameter in g["params"]]
        known = {id(parameter): names[index] for index, parameter in enumerate(before)}
        for entry in group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if id(parameter) in known:
                raise ValueError(f"add_param_group: {known[id(parameter)]!r} is in a param group already")
        check_listed_once([group], self._module)
        if self._module is not None and "param_names" in self.param_groups[0] and "param_names" not in group:
            group["params"] = with_names(group["params"], self._module, len(before))
        super().add_param_group(group)
        try:
            self._assembly.adopt(self.param_groups, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank, in the group. Local."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group. Local."""
        return self._transport.world_size

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received since construction. Local."""
        return self._transport.traffic

    @property
    def divisor(self) -> float:
        """What the sum of all ranks' gradients is divided by, once; equal on all ranks. Local.

        Settable before the first clip or step of a step. It is a true division, as ``p.grad.div_(divisor)``.
        """
        return self._reducer.divisor

    @divisor.setter
    def divisor(self, value: float) -> None:
        self._check()
        given: Any = value  # also numpy's numbers
        if isinstance(given, bool) or not isinstance(given, numbers.Real) or not math.isfinite(value) or value == 0:
            raise ValueError(f"rank {self.rank}: the divisor must be a finite number other than 0, not {value!r}")
        self._reducer.set_divisor(value if isinstance(value, (int, float)) else float(value))

    def describe(self) -> Description:
        """What this rank holds, read from the tensors themselves, beside what the formulas say. Local."""
        self._check_usable()
        return describe(
            self._stage, self._assembly.choice, self._storage, self._reducer, self._inner, self._assembly.kept_by
        )

    def check_replicas(self) -> str:
        """SHA-256 over the parameters' SHA-256s, after comparing these over the ranks. All ranks.

        Raises `RuntimeError` naming the first parameter that differs and the ranks, on every rank.
        """
        self._check()
        with self._reducer.in_turn("check_replicas"):
            self._reducer.agree("check_replicas()", self._storage.problem())
            return compare(self._transport, self._storage.fingerprints(), "check_replicas()")

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order; lengths may differ. All ranks."""
        self._check()
        with self._reducer.in_turn("exchange"):
            return self._transport.exchange(data, Tag(Kind.EXCHANGE, "exchange()"))

    def sum_over_ranks(self, value: float) -> float:
        """The sum of every rank's ``value``, the same bits on all: a step's tokens, to divide by. All ranks.

        Integers add up exactly; with a float among them, the exact sum is rounded once.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"rank {self.rank}: sum_over_ranks() adds up numbers, not {value!r}; .item() is one")
        told = [json.loads(data) for data in self.exchange(json.dumps(value).encode()) if data]
        return sum(told) if all(isinstance(number, int) for number in told) else math.fsum(told)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside, ranks may have different numbers of steps: one that leaves goes on taking part in the others' steps,
        with no gradient of its own, until all have left. All ranks.

        So training is that of the plain loop over all micro-batches that there are. Inside, every rank that has batches
        makes the same calls, and clears gradients by `zero_grad`; ``p.grad`` is a placeholder at stage 0, too. A rank
        that left takes over the others' divisor and param group options (a scheduled learning rate); what else a loop
        keeps, a scheduler or a `GradScaler`, is its own to bring up to date. At stage 3, where units travel, a rank
        keeps the gradients of a backward until it is over, and gathers for the others what they need. One optimizer of
        several at a time: a rank that left follows the calls of one.
        """
        self._check()
        turns = self._reducer.join(self.param_groups, gathers_nothing=self._storage.gathers_nothing)
        self._storage.tell_gathers(self._reducer.in_turn)
        try:
            yield
            self._storage.begin_again()
            for call in turns.others():
                self._follow(call)
        except Exception as error:
            turns.tell_failure(error)
            raise
        finally:
            while self._followed:
                self._followed.pop().__exit__(None, None, None)
            try:
                self._storage.tell_gathers(None)
            finally:
                self._reducer.leave()

    def _follow(self, call: Call) -> None:
        """Make another rank's call with it."""
        LOG.debug("%s: follows another rank's %s", self._transport.rank_label, call.name)
        adopt_options(self.param_groups, call.options)
        if self.divisor != call.divisor:
            self.divisor = call.divisor
        match call.name:
            case "exchange":
                self.exchange(b"")
            case "gather":
                self._storage.gather(call.arguments["unit"])
            case "step":
                with torch.no_grad():
                    self._step()  # without the hooks of the user's, which belong to his own calls
            case "unscale":
                found = torch.zeros(1, device=self._storage.device)
                self._reducer.unscale(found, torch.tensor([call.arguments["inverse"]], device=found.device))
            case "full_grad" | "full_master":
                getattr(self, call.name)(self._storage.parameters[call.arguments["index"]])
            case "gathered":
                block = self._storage.gathered(self._storage.at(call.arguments["places"]))
                block.__enter__()
                self._followed.append(block)
            case "end of gathered":
                block = self._followed.pop()
                try:
                    if call.arguments["write"]:
                        self._overwrite(self._storage.at(call.arguments["places"]))
                finally:
                    block.__exit__(None, None, None)
            case _:
                getattr(self, call.name)(**call.arguments)

    # -- a step -------------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add to this rank's own sum, which travels at the next backward outside, clip or step.

        A rank then holds whole gradients until that reduction, at every stage. Local, but on every rank alike.
        """
        self._check()
        return self._reducer.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the mean gradient of all parameters by its global norm, as `zero.clip_grad_norm_` does in a plain loop.

        Returns the norm before clipping, 0-dim, the same bits on every rank, at every stage and number of ranks. All
        ranks. Raises `RuntimeError` where ``error_if_nonfinite`` and the norm is nan or infinite.
        """
        self._check()
        max_norm, norm_type = check_norm_arguments(max_norm, norm_type)
        arguments = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        with self._clipping(), self._reducer.in_turn("clip_grad_norm_", **arguments):
            self._reducer.settle("clip_grad_norm_()", self._storage.problem() or self._storage.unfrozen_problem())
            return self._update.clip(max_norm, norm_type, error_if_nonfinite)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that some rank used since ``zero_grad()``. All ranks; returns the closure's loss."""
        self._check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._reducer.in_turn("step"):
            self._step()
        return loss

    def _step(self) -> None:
        with self._stepping():
            self._agree_and_update()

    def _agree_and_update(self) -> None:
        free = self._storage.retire()
        problem = self._storage.problem() if free else "step() inside gathered() or inside a forward: leave it first"
        problem = problem or self._storage.unfrozen_problem()
        told = digests_of(self.param_groups, self._inner.defaults.keys() - self._counted)
        self._reducer.settle("step()", problem, options=told)
        try:
            changed = self._update.step(self.param_groups)
        except CollectiveError:
            raise
        except Exception as error:
            self._transport.abort(f"rank {self.rank}, in step(): {type(error).__name__}: {error}")
            raise
        for number, options in changed.items():
            self.param_groups[number].update(options)
            self._counted.update(options)
        self._reducer.stepped()
        self._consolidated = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear every gradient: to None, or to zero where one exists. Local, but on every rank alike."""
        if self._built:
            self._check()
            with self._reducer.in_turn("zero_grad", set_to_none=set_to_none):
                self._reducer.zero_grad(set_to_none)

    def full_grad(self, parameter: Tensor) -> Tensor | None:
        """The whole mean gradient of ``parameter`` in its shape, a copy; None where no rank used it. All ranks."""
        self._check()
        if parameter in self._storage.replicated:
            return None
        index = self._storage.index(parameter)
        with self._reducer.in_turn("full_grad", index=index):
            return self._reducer.full_gradient(index)

    def full_master(self, parameter: Tensor) -> Tensor:
        """The whole master weights of ``parameter`` in its shape, a copy; where there are none, those that the model
        computes with, in the dtype of a master; of one that is replicated, in its own. All ranks."""
        self._check()
        if parameter in self._storage.replicated:
            return parameter.detach().clone()
        index = self._storage.index(parameter)
        spec = self._storage.layout.parameters[index]
        with self._reducer.in_turn("full_master", index=index):
            self._reducer.agree(f"full_master of {spec.name!r}", self._storage.problem())
            bucket, _, slot = next(found for found in self._storage.layout.slots() if found[2].parameter == index)
            states = self._inner.states[bucket.index]
            tag = Tag(Kind.ALL_GATHER, f"full_master of {spec.name!r}", index=bucket.index)
            held = (states.begin, states.followed_weights())
            whole = gather_slot(self._collective, self._assembly.shards.rank, bucket, slot, held, tag)
            states.leave()
            self._storage.leave(bucket.index)
        return whole.as_strided(spec.shape, spec.stride)

    # -- parameters ---------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, params: Tensor | Iterable[Tensor] | None = None, *, write: bool = False) -> Iterator[None]:
        """Whole parameters inside the block: ``params``, or all. All ranks.

        With ``write=True`` they may be edited, and group rank 0's values are everybody's after it. Where every rank
        holds whole parameters anyway, reading needs no traffic.
        """
        self._check()
        chosen = [params] if isinstance(params, Tensor) else None if params is None else list(params)
        places = self._storage.places(chosen) if self._reducer.joining else None
        with ExitStack() as block:
            with self._reducer.in_turn("gathered", places=places):
                block.enter_context(self._storage.gathered(chosen))
            try:
                yield
            finally:
                with self._reducer.in_turn("end of gathered", places=places, write=write):
                    if write:
                        self._overwrite(chosen)

    def _overwrite(self, chosen: Sequence[Tensor] | None) -> None:
        self._reducer.agree("gathered(write=True)", self._storage.problem())
        self._storage.overwrite(chosen)

    def broadcast_buffers(self) -> None:
        """Group rank 0's buffers of the module for all, as DDP has them before a forward. All ranks.

        Buffers (the running statistics of a batch norm) are each rank's own otherwise, after construction.
        """
        self._check()
        with self._reducer.in_turn("broadcast_buffers"):
            self._reducer.agree("broadcast_buffers()", self._storage.problem())
            self._storage.broadcast_buffers()

    def close(self) -> None:
        """Make the model plain again: every parameter gets memory of its own, and every hook goes. All ranks.

        What was replaced, tied or cast since construction stays as it is; a warning names what is lost with it. Raises
        only where values cannot be gathered any more, or inside a forward, a backward or `join`; while the caller's own
        exception is under way (in its ``finally``, say), that is a warning, too.
        """
        if self._closed:
            return
        first = sys.exc_info()[1]
        try:
            self._close()
        except Exception as error:
            if first is None:
                raise
            warnings.warn(f"close() after {type(first).__name__}: {error}", RuntimeWarning, stacklevel=2)

    def _close(self) -> None:
        self._transport.check_process()
        if self._storage.busy() or self._reducer.joining:
            raise RuntimeError("close() inside a forward, inside a backward or inside join(): leave it first")
        try:
            lost = self._lost()
            if lost is not None:
                warnings.warn(f"close(): {lost}", RuntimeWarning, stacklevel=3)
        finally:
            self._closed = "its parameters could not be gathered any more"
            self._assembly.release()
            self.state.forget()
            self._transport.pool.trim()
            self._assembly.shards.pool.trim()
            self._closed = "the model is plain again"

    def _lost(self) -> str | None:
        """What does not become plain by a close, or is lost by it; None where nothing is. Collective."""
        if self._assembly.superseded:
            return f"{TAKEN_OVER}, and keeps them"
        names = self._storage.replaced()
        try:
            if not self._transport.broken:
                self._reducer.agree("close()", self._storage.problem())
        except CollectiveError:
            raise
        except (RuntimeError, ValueError) as error:
            of = f"; lost: the values that this optimizer gave {', '.join(map(repr, names))}" if names else ""
            return f"{error}{of}"
        return None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Bring all states to group rank ``to``, whose ``state_dict()`` then returns them; None: to every rank, which
        then holds them whole, in the host's memory, until the next step. All ranks."""
        self._check()
        if to is not None and not 0 <= to < self.world_size:
            raise ValueError(f"consolidate_state_dict: rank {to} is not one of the {self.world_size} ranks")
        purpose = f"consolidate_state_dict(to={to})"
        with self._reducer.in_turn("consolidate_state_dict", to=to):
            self._reducer.agree(purpose)
            shards = self._assembly.shards
            whole_here = self._stage.states is Placement.WHOLE or shards.world_size == 1
            tag = Tag(Kind.EXCHANGE, purpose)
            layout = self._storage.layout
            found = checkpoint.gather(layout, self._inner, self._transport, shards, to, whole_here, tag)
            if found is not None:
                self._consolidated = found

    def state_dict(self) -> dict[str, Any]:
        """The whole, plain `torch.optim` dict (CPU), on the rank (or ranks) that `consolidate_state_dict` named. Local.

        With `mixed_precision` it also has "masters": the master weights by parameter, which torch's own classes ignore.

        With one rank nothing needs to be consolidated. Raises `RuntimeError` elsewhere, and after a further step.
        """
        self._check_usable()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if self.world_size == 1:
            self.consolidate_state_dict(0)
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} holds a shard of the states: call optimizer.consolidate_state_dict(to=rank) on all "
                "ranks, after the last step, and then state_dict() on that rank (to=None: on every rank)"
            )
        states, masters = self._consolidated
        result: dict[str, Any] = {
            "state": {index: dict(state) for index, state in states.items()},
            "param_groups": checkpoint.packed_groups(self.param_groups, self._storage.listed()),
        }
        if masters:
            result["masters"] = dict(masters)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a plain `torch.optim` dict, saved at any stage and number of ranks or by the class itself.

        Local, but on every rank with the same dict. Nothing changes unless all of it fits; `ValueError` names what
        does not. Master weights are loaded where the dict has "masters" and the model, loaded before or after, has the
        same values rounded; where it has others, or the dict none, they are the model's.
        """
        self._check()
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        saved_groups = loaded.get("param_groups", [])
        known = [spec for spec in self._storage.layout.parameters if spec.group < len(saved_groups)]
        names = self._inner.elementwise | check_elementwise(self._inner, saved_groups, known)
        mapping = checkpoint.check(loaded, self.param_groups, self._storage.listed(), names)
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            group.update(copy.deepcopy(options))
        checkpoint.scatter(loaded["state"], mapping, self.param_groups, self._storage.layout, self._inner, names)
        checkpoint.scatter_masters(loaded.get("masters", {}), mapping, self._storage.layout, self._inner)
        self._inner.elementwise, self._consolidated = names, None
        for load_hook in self._optimizer_load_state_dict_post_hooks.values():
            load_hook(self)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a ZeroOptimizer cannot be copied or pickled: it belongs to a group of ranks; save what "
            "consolidate_state_dict() and state_dict() give"
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._check_usable()
        self._transport.check_process()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError(f"this optimizer is closed: {self._closed}; build a new optimizer")
        if self._assembly.superseded:
            raise RuntimeError(f"{TAKEN_OVER}: use that, or build a new one")
        self._assembly.streams.wait_for_previous()

    def __repr__(self) -> str:
        name = f"{self._inner.name}, stage={self._stage.number}, rank {self.rank} of {self.world_size}"
        return f"ZeroOptimizer({name})\n{super().__repr__() if self._built else ''}"
