"""`ZeroOptimizer`: the public calls, their arguments and their errors. `Engine` carries them out.

Knows: the user's arguments. Does not know: the order of operations in a call.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from collectives import Algorithm, CollectiveError, Traffic, Transport

from .config import Config, Offload, check_divisor, module_of
from .core.conflicts import CLIP_TWICE, REPLICATED
from .core.parameter_specs import as_groups, check_listed, check_new, device_of, members_of, name_empty, with_names
from .core.rounding import StochasticRounding
from .core.units import Given, Ignored, Predicate
from .engine import Engine
from .parameters.materialize import InitFunction, StateDict, materializer_of
from .precision import PrecisionOption
from .runtime.compiled_calls import untraced_methods
from .runtime.flat_buffer import usable_later
from .setup import build, error_of, extend
from .state.describe import Description, describe
from .state.live_states import chosen_by, refuse
from .step.arguments import check_class, check_known, merged
from .step.classes import UserOptimizers
from .step.clip import check_norm_arguments
from .step.model_parallel import Replicated
from .step.user_optimizer import Mode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - the type alone
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - the type alone

    from .step.model_parallel import Group


_NO_PARAMETERS: Replicated = ()  # the default: any other value needs over=


@untraced_methods
class ZeroOptimizer(torch.optim.Optimizer):
    """A `torch.optim` class whose states, gradients and parameters are sharded over the ranks of a group.

    All ranks construct it. They all make each call that is marked "All ranks"; one marked "Local" sends nothing. After
    construction every rank has the parameters and buffers of group rank 0. A *shard* is the part of a bucket that one
    rank owns. A *unit* is a module whose parameters are gathered and released together at stage 3.

    Args:
        params: an ``nn.Module``, parameters, (name, parameter) pairs, or torch.optim param groups. A group may name its
            own ``optimizer_class``: what the group leaves out is that class's default, and not a value given here.
        optimizer_class: any `torch.optim` class that updates each parameter independently. It runs the implementation
            (for-loop, ``foreach``, ``fused``) that it would run in the plain loop.
        stage: 0 replicates, as DDP does; 1 shards optimizer states; 2 also gradients; 3 also parameters, including
            those of the module that ``params`` does not list. Frozen parameters other than plain fp64, fp32, bf16 or
            fp16 tensors (a quantised base model) stay whole on every rank.
        module: the module that the parameters belong to, if ``params`` is not a module. It provides names, registration
            order and buffers. Stage 3 needs it.
        process_group: a torch process group or a `collectives.Transport`. Default: torch's default group, or one rank.
        mesh: in place of ``process_group`` and ``sharding_factor``, a torch `DeviceMesh` of one dimension, which
            shards, or of two, which replicate and shard; also a part of a larger one, as in ``mesh["dp"]``.
        divisor: the number by which the summed gradient is divided. None: the number of ranks, as in DDP.
        bucket_cap_mb: MiB per bucket, as in DDP. None: 25 on the CPU; on accelerators one bucket per unit at stage 3,
            and a twelfth of the model at stages 0 to 2, a quarter for one rank (`describe` prints it). "auto": like
            None, but at least the largest unit if 64 or more ranks share a copy.
        collective: an algorithm of `collectives`, by name or as a class. "auto": the fastest one for the placement of
            the ranks and the parameters; `describe` prints which one, and why.
        sharding_factor: F, the number of ranks that share one copy of what the stage shards. It divides the number of
            ranks, and defaults to it. Ranks 0 to F - 1 form one replica, F to 2F - 1 the next; all replicas hold the
            same. With F ranks per host, gathers stay inside a host. 1 shards nothing. Every F gives the same bits.
        reshard_after_forward: at stage 3, what a rank keeps of a unit between its forward and its backward. True: only
            its own shard. False: the whole unit, so the backward gathers nothing. A number: that many neighbouring
            ranks (of one host, say) share it, and the backward gathers among them. A function: True or False by module.
        prefetch_depth: at stage 3, how many units are gathered ahead of their use. Each costs a unit's memory.
        offload: tensors kept on disk, or in the host's memory if the parameters are on a GPU; see `Offload`.
        param_init_fn: initialises a model that was built under ``torch.device("meta")``. It is called with each module
            that directly holds meta tensors, in registration order, once they have memory. Default: the module's
            ``reset_parameters()``. At stage 3 a unit is sharded before the next one gets memory.
        init_state_dict: values for such a model, by name: a mapping, which is read tensor by tensor, or the path or
            paths of safetensors files. Names and shapes must be the model's (`LazyStateDict` changes them), but
            ``param_init_fn`` may initialise what is missing. Tensors that already have values get those of the mapping,
            too.
        mixed_precision: compute in 16 bits, with fp32 master weights, as a whole or by module: see `MixedPrecision`.
        units: at stage 3, a predicate (module -> bool) that selects the units. A unit is gathered as a whole just
            before its forward and its backward. It holds what no unit inside it holds. Default: the children of
            outermost ``ModuleList`` and ``Sequential``.
        partition: "element": ranks own pieces of parameters, for element-wise classes. "parameter": each parameter has
            one owner, which updates it whole, for classes that need matrices (Muon, Adafactor). "block": ranks own
            pieces that begin at multiples of 4,096 elements, for classes whose states have a value for each block of
            consecutive elements (8 bits); a parameter whose pieces would not have states of the same kinds has one
            owner. A param group may have its own; and it may have ``blocks``, a dimension or a list of sizes along the
            first one: then the class steps each block of its parameters by itself, and each has one owner. Default:
            "element", or, with a warning, "parameter" if the class is not element-wise.
        rounding: keep weights and states in bf16, rounded at random, without fp32 masters; see `StochasticRounding`.
        ignored: parameters and modules, parts of the module, that are neither sharded nor synchronised: each rank's own
            experts, say. Nothing about them changes, buffers included; see `clip_grad_norm_`.
        optimizer_kwargs: further arguments of ``optimizer_class``, by name. Here, an argument may have the name of an
            argument of `ZeroOptimizer` (``stage``, ``module``, ...).
        defaults: arguments of ``optimizer_class``.

    Raises:
        ValueError, TypeError: an argument or a parameter is invalid; the message names it. If the ranks built different
            models, every rank raises, and names the first difference.
        collectives.CollectiveError: here and in every all-ranks call: a rank failed, ended, did not answer in time, or
            made another call. Every rank raises it, and the optimizer can then only be closed.
    """

    _engine: Engine
    _built = False

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        stage: int = 2,
        module: nn.Module | None = None,
        process_group: ProcessGroup | Transport | None = None,
        mesh: DeviceMesh | None = None,
        divisor: float | None = None,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        collective: str | Algorithm = "auto",
        sharding_factor: int | None = None,
        reshard_after_forward: bool | int | Predicate = True,
        prefetch_depth: int = 1,
        offload: Offload | None = None,
        param_init_fn: InitFunction | None = None,
        init_state_dict: StateDict | None = None,
        mixed_precision: PrecisionOption = None,
        units: Predicate | None = None,
        partition: Literal["element", "parameter", "block"] | None = None,
        rounding: StochasticRounding | None = None,
        ignored: Given | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        **defaults: Any,
    ) -> None:
        self._module = module_of(params, module)
        config = Config(
            module=self._module,
            process_group=process_group,
            mesh=mesh,
            stage=stage,
            sharding_factor=sharding_factor,
            reshard_after_forward=reshard_after_forward,
            prefetch_depth=prefetch_depth,
            offload=offload,
            mixed_precision=mixed_precision,
            bucket_cap_mb=bucket_cap_mb,
            collective=collective,
            units=units,
            partition=partition,
            rounding=rounding,
            ignored=Ignored(ignored, self._module),
        )
        groups = as_groups(params, config.ignored)
        arguments = merged(defaults, optimizer_kwargs)
        check_class(optimizer_class)
        check_known(optimizer_class, arguments, (option.name for option in fields(config)))
        self._user_optimizers = user_optimizers = UserOptimizers(optimizer_class, arguments, groups)
        device = device_of(groups)
        device = config.default_device() if device.type == "meta" else device
        listed = [entry[1] if isinstance(entry, tuple) else entry for group in groups for entry in group["params"]]
        find_meta = partial(
            materializer_of,
            self._module,
            listed,
            param_init_fn,
            init_state_dict,
            config.default_device,
            config.ignored,
        )
        problem = error_of(lambda: check_listed(groups, self._module, config.ignored)) or error_of(
            lambda: super(ZeroOptimizer, self).__init__(groups, user_optimizers.main.defaults)
        )
        self._parts = parts = build(config, user_optimizers, listed, device, find_meta)
        extend(parts, [] if problem else self.param_groups, 0, problem)
        self._transport, self._storage, self._reducer = parts.transport, parts.storage, parts.reducer
        self._engine = Engine(parts)
        self._built = True
        self.divisor = self._transport.world_size if divisor is None else divisor
        parts.log_choices()

    # -- construction -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of new parameters, in their own buckets. All ranks, between two steps."""
        if not self._built:
            self._append(param_group)
            return
        self._engine.check_may_add()
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group is {param_group!r:.100}, not a param group with 'params'")
        if edited := self._user_optimizers.changed(self.param_groups):
            extend(self._parts, self.param_groups, len(self.param_groups), RuntimeError(edited))
        group = {**param_group, "params": members_of(param_group["params"], "param_group['params']")}
        before = [parameter for g in self.param_groups for parameter in g["params"]]
        check_new(group["params"], before, self._storage.listed())
        check_listed([group], self._module, self._storage.ignored)
        if "param_names" in self.param_groups[0] and "param_names" not in group:
            name_empty([group])
            if self._module is not None:
                group["params"] = with_names(group["params"], self._module, len(before))
        count = len(self.param_groups)
        try:
            problem = error_of(lambda: self._append(group))
            extend(self._parts, self.param_groups, count, problem)
        except Exception:
            del self.param_groups[count:]
            self._user_optimizers.forget(count)
            raise
        self._engine.check_modes()

    def _append(self, group: dict[str, Any]) -> None:
        """Append a param group, with the defaults of the class that it names, if it names one."""
        completed = self._user_optimizers.complete(group)
        own = {**completed, **group}
        super().add_param_group(completed)
        self._user_optimizers.drop_foreign(completed, own)

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this rank in the group. Local."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group. Local."""
        return self._transport.world_size

    @property
    def traffic(self) -> Traffic:
        """The messages and bytes that this rank has sent and received since construction. Local."""
        return self._transport.traffic

    @property
    def divisor(self) -> float:
        """The number by which the sum of all ranks' gradients is divided, once. Equal on all ranks. Local.

        Set it before the first clip or `step` of a step. The division is a true one, as ``p.grad.div_(divisor)``.
        """
        return self._reducer.schedule.divisor

    @divisor.setter
    def divisor(self, value: float) -> None:
        self._engine.check()
        self._reducer.set_divisor(check_divisor(value, self.rank))

    def describe(self) -> Description:
        """Return the bytes that this rank holds, next to the formulas; ``print`` shows them as a table. Local."""
        self._engine.check_usable()
        parts = self._parts
        mesh = "" if parts.mesh is None else str(parts.mesh)
        return describe(parts.stage, parts.choice, self._storage, self._reducer, parts.reshard_group_size, mesh)

    def check_replicas(self) -> str:
        """Compare the parameters of all ranks, and return the SHA-256 (hexadecimal) over their SHA-256s. All ranks.

        Raises `RuntimeError` on every rank if parameters differ; it names the first one, and the ranks.
        """
        return self._engine.check_replicas()

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, in rank order, on every rank. Lengths may differ. All ranks."""
        return self._engine.exchange(data)

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum of every rank's ``value``, with the same bits on all ranks. All ranks.

        Use it, for instance, to sum the tokens of a step for `divisor`. Integers add up exactly. If any value is a
        float, the exact sum is rounded once.
        """
        return self._engine.sum_over_ranks(value)

    def join(self) -> AbstractContextManager[None]:
        """Return a context in which ranks may have different numbers of steps. All ranks.

        A rank that leaves the block early takes part in the other ranks' steps, without a gradient, until all have
        left. Training then equals the plain loop over all micro-batches that exist.

        - Ranks that still have batches make the same calls, and clear gradients by `zero_grad`.
        - ``p.grad`` is a placeholder even at stage 0.
        - A rank that has left takes over the others' divisor and param group options (a scheduled learning rate). The
          loop itself must update any other state, such as a scheduler or a `GradScaler`.
        - At stage 3, if units are gathered from other ranks, a rank keeps the gradients of a backward until it ends,
          and a rank that has left takes part in every gather.
        - Only one optimizer at a time can be inside `join`: a rank that has left follows the calls of one optimizer.
        """
        return self._engine.join(self.param_groups)

    # -- a step -------------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which a backward adds to this rank's own sum of gradients, and nothing is reduced.

        The next backward outside, clip or step reduces the sum. Until then a rank holds whole gradients, at every
        stage. Local, but every rank must make the call.
        """
        self._engine.check()
        return self._reducer.no_sync()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that any rank used since `zero_grad`. All ranks. Returns the loss of ``closure``."""
        self._engine.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step(self.param_groups)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return False: a `GradScaler` decides about a step. It reads this right before. Internal."""
        self._reducer.asked_for_step()
        return False

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        over: Group | Sequence[Group] | None = None,
        replicated: Replicated = _NO_PARAMETERS,
        also: Iterable[ZeroOptimizer] | None = None,
    ) -> Tensor:
        """Clip the mean gradient of all parameters by its global norm, as `zero.clip_grad_norm_` does in a plain loop.

        Returns the norm before clipping, 0-dim, with the same bits on every rank, at every stage and number of ranks.
        It is on the gradients' device if kernels computed it there, otherwise on the CPU. All ranks. Raises
        `RuntimeError` if ``error_if_nonfinite`` is set and the norm is nan or infinite.

        Args:
            max_norm: the largest norm that is not scaled, at least 0; inf to measure without clipping.
            norm_type: p, greater than 0; inf for the largest magnitude.
            error_if_nonfinite: raise instead of scaling by a norm that is inf or NaN.
            over: with tensor, expert or pipeline parallelism by hand, the ranks that hold the other parts of the model:
                one of each optimizer, at the same place. They all make the call. The norm is then the whole model's.
                With two of these, both groups, such as ``[mesh["tp"], mesh["pp"]]``: each is added up in turn.
            replicated: the parameters that each rank of ``over`` (of its first group) has, under one name and with the
                same gradient, or a predicate (name, parameter) -> bool. Each counts once. `ValueError` names one whose
                gradients differ. Only with ``over``.
            also: further `ZeroOptimizer`s of this rank, over groups of ranks that lie inside this one's group (over the
                experts of an expert-parallel group, say), in any order; a rank without one gives ``[]``. The norm is
                that of all their gradients together, on all ranks, and all are scaled. Not inside `join`, nor with
                ``over``. `ValueError` if a rank of such a group is not in this one's, or has not given it.
        """
        problem: Exception | None = None
        try:
            max_norm, norm_type = check_norm_arguments(max_norm, norm_type)
            others = _further_engines(self, () if also is None else also)
            if over is None and replicated is not _NO_PARAMETERS:
                raise ValueError(REPLICATED.text())
            if over is not None and also is not None:
                raise ValueError(CLIP_TWICE.text())
        except Exception as error:
            if over is None and also is None:
                raise
            problem, others = error, []  # other ranks wait for this one: they must know
        clip: Any = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        if over is not None:
            return self._engine.clip_whole_model(over, replicated, problem=problem, **clip)
        self._engine.model_part.warn_of_others()
        if also is None:
            with self._engine.model_part.alone():
                return self._engine.clip_grad_norm_(**clip)
        return self._engine.clip_together(others, problem=problem, **clip)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set every gradient to None, or the existing ones to zero. Local, but every rank must make the call."""
        self._engine.zero_grad(set_to_none=set_to_none)

    # -- modes, and memory on a device ----------------------------------------------------------------------------

    @property
    def train(self) -> Callable[[], None]:
        """Exchange the weights for those with which steps are taken, by the class's ``train()``. All ranks.

        Call it before the first step and after each evaluation. Like `eval`, it is called between a backward and a step
        or between steps, outside of `join` and `gathered`. All ranks raise the same `RuntimeError` otherwise, and if a
        parameter was cast, moved or replaced. A call in that mode does nothing and sends nothing. With
        `mixed_precision` the class exchanges master weights, which are then rounded. Without a class that has both
        methods, this attribute is an `AttributeError`.
        """
        return self._call_of("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Exchange the weights for those that are evaluated, by the class's ``eval()``. All ranks. See `train`."""
        return self._call_of("eval")

    def _call_of(self, mode: Mode) -> Callable[[], None]:
        if not self._user_optimizers.with_modes():
            raise AttributeError(
                f"{self._user_optimizers.names()} has no train() and eval(), and trains and evaluates the same "
                f"weights: leave out optimizer.{mode}()"
            )

        def call() -> None:
            self._engine.set_mode(self.param_groups, mode)

        call.__qualname__ = f"ZeroOptimizer.{mode}"  # torch's modules have train(False), which is refused by this name
        return call

    def offload(self) -> None:
        """Move all that this optimizer holds on a device to the host's memory, until `reload`. All ranks.

        Parameters, shards, master weights, states and running averages move, and scratch memory is freed. So a loop can
        lend the GPU to generation between two steps. Call it after `zero_grad`: gradients do not move.

        Until `reload` every use of the model's parameters, forward, backward or other call of the optimizer raises
        `RuntimeError`; `close` reloads first. The bits are the same afterwards. What does not belong to the optimizer
        stays on the device: the module's buffers, replicated parameters, and (at stages 0 to 2) parameters that it does
        not update. torch keeps freed memory for its own next tensors; for another process call
        ``torch.cuda.empty_cache()``.

        The memory on the host is pinned, takes the same number of bytes, and is kept for the next call. For parameters
        on the CPU no memory moves, but the same calls raise. Tensors of ``optimizer.state`` that were read before do
        not follow.

        Raises `RuntimeError` on every rank, and nothing has changed, if gradients are there or a rank's host has too
        little memory.
        """
        self._engine.offload()

    def reload(self) -> None:
        """Move all that `offload` has moved back to the device. All ranks. Does nothing if nothing was moved.

        Raises `RuntimeError` on every rank if a device has too little memory. All is on the host still: free memory,
        and call it again.
        """
        self._engine.reload()

    # -- parameters ---------------------------------------------------------------------------------------------------

    def gathered(
        self, params: Tensor | Iterable[Tensor] | None = None, *, write: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in which ``params``, or all parameters, are whole. All ranks.

        With ``write=True`` they may be edited; after the block every rank has group rank 0's values. Reading sends
        nothing if every rank holds whole parameters anyway.
        """
        return self._engine.gathered(chosen_by(params, "gathered()"), write)

    def full_grad(self, parameter: Tensor) -> Tensor | None:
        """Return a copy of the whole mean gradient of ``parameter``, in its shape, on its device. All ranks.

        Its dtype is the parameter's; with `mixed_precision` it is ``accumulate_dtype``. Returns None if no rank used
        the parameter. Raises `RuntimeError` if a gradient is not reduced yet.
        """
        self._engine.check()
        if parameter in self._storage.replicated:
            return None
        return self._engine.full_grad(index=self._storage.index(parameter))

    def set_full_grad(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Replace the mean gradient of ``parameter``, as ``p.grad = gradient`` does in the plain loop after the
        division. All ranks.

        Every rank gets the values of the first one; the others need a tensor as well. Shape and dtype are those of
        `full_grad`. None: the parameter has no gradient, and a step leaves it alone. Like a clip, the call ends the
        sum: clips and a step may follow, and a backward counts only after `zero_grad`. Raises the same error on every
        rank if the tensor does not fit, if the parameter is frozen, or if some ranks give None.
        """
        self._engine.check()
        if parameter not in self._storage.replicated:
            self._engine.set_full_grad(self._storage.index(parameter), gradient)
        elif gradient is not None:
            name = self._storage.replicated[parameter].name
            raise ValueError(f"set_full_grad of {name!r}: the parameter is frozen and replicated: give None")

    def full_master(self, parameter: Tensor) -> Tensor:
        """Return a copy of the whole master weights of ``parameter``, in its shape. All ranks.

        Without master weights these are the parameter's values, in the master's dtype. For a replicated parameter they
        have the parameter's own dtype.
        """
        self._engine.check()
        if parameter in self._storage.replicated:
            return parameter.detach().clone()
        return self._engine.full_master(index=self._storage.index(parameter))

    def broadcast_buffers(self) -> None:
        """Copy group rank 0's buffers of the module to all ranks, as DDP does before a forward. All ranks.

        Without this call, each rank's buffers (the running statistics of a batch norm) are its own after construction.
        """
        self._engine.broadcast_buffers()

    def full_state_dict(self, to: int | None = 0, *, masters: bool = False) -> dict[str, Any] | None:
        """Return the whole state dict of the module in the host's memory, on group rank ``to``; None elsewhere. All
        ranks.

        With ``to=None`` every rank gets it. Names, ties and hooks are those of ``module.state_dict()``, without what
        `torch.compile` puts into names; buffers are those of the rank that gets the dict. Every tensor is a copy with
        memory of its own. Parameters have the dtype with which the model computes. With ``masters=True`` those that
        have master weights are these, in their dtype. One bucket at a time is whole on the device. Needs the module.

        What is in ``ignored`` is left out: it may differ between ranks, and another optimizer may hold its values.
        """
        return self._engine.full_state_dict(to=to, masters=masters)

    def full_tensors(self, to: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the names and the whole tensors of the module, on every rank or on group rank ``to``. All ranks.

        The tensors are the parameters, in the dtype with which the model computes, and the buffers that a state dict
        has: each once, under the first of its names, as a copy on the device of its parameter. Hooks of `state_dict`
        are not called. One bucket is whole at a time. What is in ``ignored`` is left out. Needs the module.

        Every rank must read its iterator to the end or close it, also where it is empty, because each bucket comes from
        all ranks; the others wait for that, at most the group's time limit. Iterate in the ``for`` itself, which closes
        it when the loop is left; who keeps it closes it before the next forward, as by `contextlib.closing`. After a
        backward, or a call at which the ranks agree, the next tensor is a `RuntimeError`.

        Raises, on every rank and at the call, `RuntimeError` inside a forward, a backward, `gathered`, `join` or
        `applied`, and `ValueError` or `TypeError` for a wrong ``to``.
        """
        return self._engine.full_tensors(to=to)

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Load what `full_state_dict` returned at any stage and number of ranks, or a plain state dict. All ranks.

        The dict of the first rank that gives one is loaded; other ranks may give None. Parameters and buffers become
        its values on every rank; what a module's ``get_extra_state`` returned is not loaded. Where a value is wider
        than the parameter, the parameter is rounded, and the master weights become the value itself; else master
        weights follow as after an edit of the model. Optimizer states and gradients stay as they are. Raises
        `RuntimeError` on every rank if names or shapes are not those of the module, and `ValueError` if no rank gives a
        dict; nothing has changed then.
        """
        self._engine.load_full_state_dict(state_dict)

    def close(self) -> None:
        """Make the model plain again: each parameter gets its own memory, and all hooks are removed. All ranks.

        Parameters that were replaced, tied or cast since construction stay as they are; a warning names lost values.
        Raises only if values cannot be gathered any more, or inside a forward, a backward or `join`. While another
        exception propagates, the error is a warning, or dropped if the ranks had failed.
        """
        if self._engine.is_closed:
            return
        first, was_broken = sys.exc_info()[1], self._transport.broken
        try:
            self._engine.close()
        except Exception as error:
            if first is None:
                raise
            if not (was_broken and isinstance(first, CollectiveError)):  # else the reason is on its way
                warnings.warn(f"close() after {type(first).__name__}: {error}", RuntimeWarning, stacklevel=2)

    # -- states -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """A live mapping from each parameter to this rank's part of its optimizer states, by name. Local.

        A state is 1-D if the rank holds a piece of the parameter. If it holds all of it, the state has the parameter's
        shape. Tensors may be edited in place. An assignment raises `TypeError`: see `reset_states`.
        """
        return self._engine.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._built:  # torch's constructor assigns an empty dict
            refuse()

    def reset_states(self, params: Tensor | Iterable[Tensor] | None = None) -> None:
        """Forget the states of ``params``, or of all parameters, as if no step had used them. All ranks.

        The next step starts from new states, as after ``del optimizer.state[p]`` in torch. They begin as the class
        begins them, which need not be 0. Master weights, gradients and param groups stay as they are.
        """
        self._engine.reset_states(self.param_groups, chosen_by(params, "reset_states()"))

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a ZeroOptimizer cannot be copied or pickled: it belongs to a group of ranks; save what "
            "consolidate_state_dict() and state_dict() give"
        )

    def __setstate__(self, state: dict[str, Any]) -> NoReturn:
        refuse()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Send all optimizer states to group rank ``to``, where `state_dict` then returns them. All ranks.

        With None every rank gets all of them, and holds them in the host's memory until the next step.
        """
        self._engine.consolidate_state_dict(to=to)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole, plain `torch.optim` dict, on the CPU; for several classes, one for each by name. Local.

        First call `consolidate_state_dict`, which chooses the rank, or all ranks, that can return it; a group of one
        rank need not. With `mixed_precision` the dict also has "masters": the master weights by parameter, which
        torch's own classes ignore. Raises `RuntimeError` on other ranks, and after a further step.
        """
        self._engine.check_usable()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if self.world_size == 1:
            self.consolidate_state_dict(0)
        result = self._engine.dicts.dict_of(self.param_groups)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a plain `torch.optim` dict, saved at any stage and number of ranks or by the torch class itself.

        Keys may also be parameter names, as in FSDP2's dicts. Local, but every rank must load the same dict. Nothing
        changes unless the whole dict fits; `ValueError` names the first misfit. Master weights come from the dict's
        "masters"; without it the optimizer keeps its own. Where they do not round to the model's values (the model may
        be loaded before or after), they become those values at the next step.
        """
        self._engine.check()
        loaded = dict(state_dict or {})
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        self._engine.before_load()
        with usable_later():
            self._engine.dicts.load(loaded, self.param_groups)
        for load_hook in self._optimizer_load_state_dict_post_hooks.values():
            load_hook(self)

    def __repr__(self) -> str:
        place = f"stage={self._parts.stage.number}, rank {self.rank} of {self.world_size}"
        return f"ZeroOptimizer({self._user_optimizers.names()}, {place})\n{super().__repr__()}"


def _further_engines(first: ZeroOptimizer, also: Any) -> list[Any]:
    """Return the engines of further optimizers. Raises `TypeError` if ``also`` is no list of these, or if one is the
    first one, or there twice."""
    if not isinstance(also, Iterable):
        raise TypeError(f"also must be a list of further ZeroOptimizers, not a {type(also).__name__}")
    found: list[ZeroOptimizer] = []
    for number, other in enumerate(also):
        if not isinstance(other, ZeroOptimizer) or any(other is known for known in (first, *found)):
            raise TypeError(f"also[{number}] must be a further ZeroOptimizer, each once, not {type(other).__name__}")
        found.append(other)
    return [each._engine for each in found]
