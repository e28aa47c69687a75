"""Carries out the calls of an optimizer on one rank.

Knows: the order of operations in a call, and what ranks agree on before it. The parts do the work: `setup` (registers
parameters), `storage` and `sharded` (hold parameters), `reducer` (gradients to means), `update` (clip and step),
`user_optimizers` (the user's classes), `plain_dicts`.

One clip of several optimizers (`clip_together`): their gradients have one norm, and get one factor.

    agree        on the arguments, and that each further optimizer is given by all its ranks    all ranks of the first
    finalize     each further optimizer's sums become means                                     the ranks of its group
    norm         each rank's exact sum, over its shards in all of them; one exchange            all ranks of the first
    scale        one factor                                                                     each rank alone

The sum has every element once, because the group of each further optimizer lies inside the first one's: its number, on
which its ranks agree, is sent by as many ranks as it has. All ranks enter the further optimizers in the order of these
numbers, so ranks that were given them in other orders do not wait for each other.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collectives import CollectiveError, Kind, Tag, as_a_whole
from collectives.torch_internals import current_graph_task_id

from .consistency import compare
from .core.conflicts import JOINT_CLIP
from .core.norm import PowerSum
from .gradients.agreement import Call, adopt_options, digests_of
from .gradients.whole_gradients import WholeGradients
from .parameters.own_storages import own_storages
from .parts import Parts
from .runtime.compiled_calls import untraced, untraced_context
from .runtime.flat_buffer import usable_later
from .runtime.flat_states import Options
from .runtime.profiler_ranges import LOG, ProfilerRange
from .state.average import Averages
from .state.device_memory import DeviceMemory
from .state.full_state import FullState
from .state.gather import gather_master
from .state.live_states import States, agree_to_forget, forget_states
from .state.plain_dicts import PlainDicts
from .step.model_parallel import ModelPart, Places, Replicated
from .step.user_optimizer import Mode

WRONG_MODE = (
    "a forward in {module} mode with the weights of the optimizer's {optimizer} mode: call optimizer.{module}() on all "
    "ranks where model.{module}() is called"
)


class ModeCheck:
    """A forward-pre hook that warns once if a module runs with the weights of the other mode.

    It does nothing once the engine is gone. A copy of the module has one that does nothing. A compiler leaves it out.
    """

    def __init__(self, engine: Any = None) -> None:
        """``engine``: has ``wrong_mode``, which returns the mode of the weights if it is not the one given."""
        self._engine = None if engine is None else weakref.ref(engine)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._engine is None:
            return
        engine = self._engine()
        wanted = "train" if module.training else "eval"
        wrong = None if engine is None else engine.wrong_mode(wanted)
        if wrong is not None:
            self._engine = None
            warnings.warn(WRONG_MODE.format(module=wanted, optimizer=wrong), RuntimeWarning, stacklevel=5)


TAKEN_OVER = "a newer ZeroOptimizer took over parameters of this one"
_Result = TypeVar("_Result")


def joinable(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a method so that, inside `join`, ranks that have run out of batches call it, too."""

    @functools.wraps(method)
    def call(self: Engine, **arguments: Any) -> _Result:
        self.check()
        with self._joining.broadcast(method.__name__, **arguments):
            return method(self, **arguments)

    return call


_CALL = "clip_grad_norm_()"
_TOGETHER = "clip_grad_norm_(also=...)"


def clip_together(
    first: Parts,
    others: Sequence[Parts],
    problem: str | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip the mean gradients of all these optimizers by their common norm; return it, 0-dim, on the host. Collective.

    All ranks of ``first`` call this, each with ``others`` of its own, in any order. ``problem``: an error that this
    rank has found. Raises an error on every rank if an optimizer cannot be clipped now, if arguments or divisors
    differ, or if a rank of one of ``others`` is not in the group of ``first``, or was not given it. Where a gradient of
    any of them is infinite or NaN, a `GradScaler` that has unscaled skips the steps of all.
    """
    others = sorted(others, key=_number)
    _agree(first, others, problem, [max_norm, norm_type, error_if_nonfinite])
    total, failed = first.update.norm_sum(norm_type), None
    for other in others:
        try:
            other.reducer.finalize_grads(_CALL, _problem(other))
            total = total.merge(other.update.norm_sum(norm_type))
        except Exception as error:  # the ranks of the other groups wait for this one
            failed = failed or error
    message = json.dumps(None if failed is None else str(failed)).encode() + b"\0" + total.to_bytes()
    told = [data.partition(b"\0") for data in first.transport.exchange(message, Tag(Kind.EXCHANGE, "gradient norm"))]
    if failed is not None:
        raise failed
    for rank, (why, _, _) in enumerate(told):
        if (text := json.loads(why)) is not None:
            raise RuntimeError(f"{_TOGETHER}, on rank {rank}: {text}")
    total = reduce(PowerSum.merge, (PowerSum.from_bytes(part) for _, _, part in told))
    norm = total.norm()
    for parts in (first, *others):
        parts.reducer.note_elsewhere(is_finite=total.is_finite)
    for parts in (first, *others):
        parts.update.scale(norm, max_norm, norm_type, error_if_nonfinite)
    return norm


def _number(parts: Parts) -> int:
    """Return a number of an optimizer, which its ranks have in common: chosen at random as its channel was opened."""
    return parts.transport.links.number


def _agree(first: Parts, others: Sequence[Parts], problem: str | None, arguments: list[float]) -> None:
    """Agree to the clip with all ranks of the first optimizer, and turn its sums into means. Collective."""
    problem = problem or next(filter(None, (_refused(first, parts) for parts in (first, *others))), None)
    among = [parts for parts in others if parts.transport.world_size > 1]
    given = [[_number(parts), parts.transport.world_size, parts.transport.rank, _names(parts)] for parts in among]
    message = json.dumps({"arguments": arguments, "given": given}).encode()
    records = first.reducer.check_consistency(_TOGETHER, problem or _problem(first), message=message)
    _check([json.loads(record.attachment) for record in records])
    first.reducer.finalize_agreed(_TOGETHER, records)


def _names(parts: Parts) -> str:
    names = [spec.name for spec in parts.storage.layout.parameters]
    return f"that of {names[0]!r}" + (f" and {len(names) - 1} more parameters" if names[1:] else "")


def _check(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` if arguments differ, or if a rank of a further optimizer has not given it."""
    for rank, theirs in enumerate(facts):
        if theirs["arguments"] != facts[0]["arguments"]:
            raise ValueError(
                f"{_TOGETHER}: max_norm, norm_type and error_if_nonfinite are {facts[0]['arguments']} on rank 0, and "
                f"{theirs['arguments']} on rank {rank}"
            )
    known: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for rank, theirs in enumerate(facts):
        for number, size, place, names in theirs["given"]:
            known.setdefault((number, size), []).append((rank, place, names))
    for (_, size), given in known.items():
        missing = set(range(size)) - {place for _, place, _ in given}
        if missing:
            rank, _, names = given[0]
            raise ValueError(
                f"{_TOGETHER}: rank {rank} has given a further optimizer of {size} ranks, {names}, but its rank "
                f"{min(missing)} has not, so the norm would lack gradients: clip by the optimizer whose group has all "
                "ranks, and give each further one on all of its ranks"
            )


def _refused(first: Parts, parts: Parts) -> str | None:
    """Return why an optimizer cannot be clipped together with the first one now, else None. Local."""
    try:
        parts.reducer.check_synchronised(_CALL)
    except RuntimeError as error:
        return str(error)
    if parts.joining.active:
        return JOINT_CLIP.text()
    own, theirs = first.reducer.schedule.divisor, parts.reducer.schedule.divisor
    if own != theirs:
        return (
            f"{_TOGETHER}: this optimizer divides by {own}, and a further one by {theirs}, so their gradients "
            f"are not means over the same micro-batches: build the further one with divisor={own}"
        )
    return None


def _problem(parts: Parts) -> str | None:
    """Return an error that this rank finds in an optimizer, else None."""
    storage = parts.storage
    return storage.diagnose(waits=False) or storage.diagnose_unfrozen() or parts.user_optimizers.changed()


class Engine:
    """One optimizer on one rank. Every method is collective unless it is marked as local."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._transport, self._storage, self._reducer = parts.transport, parts.storage, parts.reducer
        self._joining, self.watchers = parts.joining, parts.update.watchers
        ranks, collective = (parts.transport, parts.shard_group), parts.collective
        self.averages = Averages(parts.stage, parts.storage, parts.reducer, *ranks, collective)
        self._gradients = WholeGradients(parts.storage.buckets, parts.reducer, *ranks, collective)
        self._full_state = FullState(parts.module, parts.stage, parts.storage, parts.reducer, *ranks)
        self.dicts = PlainDicts(parts.stage, parts.storage, parts.user_optimizers, parts.transport, parts.shard_group)
        self._closed = ""  # why the optimizer cannot be used any more
        self._gathered = 0  # blocks of `gathered` around this moment
        self._user_optimizers, self._update = parts.user_optimizers, parts.update
        self.state = States(self._storage, self.watchers, parts.streams)
        rank = self._transport.rank_label
        self._stepping, self._clipping = ProfilerRange("step", rank), ProfilerRange("clip", rank)
        self._counted: set[str] = set()  # options that the class itself changes, perhaps only on some ranks
        self._blocks: list[AbstractContextManager[None]] = []  # of other ranks' calls of `gathered`, inside `join`
        self.model_part = ModelPart(
            parts.job_size, parts.transport, parts.shard_group, self._storage, self._reducer.means, self._joining
        )
        self._mode_check: RemovableHandle | None = None
        self.check_modes()
        self._memory = DeviceMemory(self._storage, self.averages, self._transport, parts.shard_group, parts.streams)

    # -- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `RuntimeError` if the optimizer cannot be used any more, or not in this process. Local."""
        self.check_usable()
        self._transport.check_process()

    def check_usable(self) -> None:
        """Do as `check`, but allow calls in a process that was forked from a rank's. Local."""
        self._check_not_closed()
        self.parts.streams.wait_for_previous()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"this optimizer is closed: {self._closed}; build a new optimizer")
        if self.parts.superseded:
            raise RuntimeError(f"{TAKEN_OVER}: use that, or build a new one")

    def _check_rank(self, to: int | None, purpose: str) -> None:
        if to is None:
            return
        if isinstance(to, bool) or not isinstance(to, int):
            raise TypeError(f"{purpose}: to must be the number of a rank, or None for all, not {to!r}")
        if not 0 <= to < self._transport.world_size:
            raise ValueError(f"{purpose}: rank {to} is not one of the {self._transport.world_size} ranks")

    def _between_steps(self, purpose: str, problem: str | None = None) -> str | None:
        """Raise `RuntimeError` inside a backward, `join` or `applied`. Return ``problem``, an error that this rank has
        found, or the error's text inside `gathered` or a forward, where other ranks need not be; else None."""
        self.check()
        self.averages.refuse_applied(purpose)
        if current_graph_task_id() >= 0 or self._reducer.hooks.inside_backward or self._joining.active:
            raise RuntimeError(f"{purpose} inside a backward or inside join(): leave it first")
        if problem is not None:
            return problem
        is_free = not self._gathered and self._storage.unit_hooks.end_iteration()
        return None if is_free else f"{purpose} inside gathered() or inside a forward: leave it first"

    def check_may_add(self) -> None:
        """Raise `RuntimeError` if no param group can be added now. Local."""
        self.check()
        if self._reducer.hooks.inside_backward or self._joining.active:
            raise RuntimeError("add_param_group() inside a backward or inside join(): leave it first")
        if not self._storage.unit_hooks.end_iteration():
            raise RuntimeError("add_param_group() inside gathered() or inside a forward: leave it first")

    # -- join ---------------------------------------------------------------------------------------------------------

    @untraced_context
    def join(self, groups: Sequence[Options]) -> Iterator[None]:
        """Return a context in which a rank that leaves early makes the others' calls with them until all have left."""
        self.check()
        turns = self._reducer.join(groups, gathers_are_broadcast=self._storage.unit_hooks.needs_gather)
        self._storage.unit_hooks.reset_order()
        try:
            with self.parts.streams.block():
                yield
            self._storage.unit_hooks.reset_order()
            for call in turns.others():
                self._follow(call, groups)
        except Exception as error:
            turns.report_failure(error)
            raise
        finally:
            while self._blocks:
                self._blocks.pop().__exit__(None, None, None)
            try:
                self._storage.unit_hooks.reset_order()
            finally:
                self._reducer.end_join()

    def _follow(self, call: Call, groups: Sequence[Options]) -> None:
        """Make another rank's call together with it."""
        LOG.debug("%s: follows another rank's %s", self._transport.rank_label, call.name)
        adopt_options(groups, call.options)
        if self._reducer.schedule.divisor != call.divisor:
            self._reducer.set_divisor(call.divisor)
        match call.name:
            case "exchange":
                self.exchange(b"")
            case "gather":
                self._storage.gather(call.arguments["unit"])
            case "step":
                self.step(groups)
            case "unscale":
                found = torch.zeros(1, device=self._storage.device)
                self._reducer.unscale(found, torch.tensor([call.arguments["inverse"]], device=found.device))
            case "set_full_grad":
                self.set_full_grad(call.arguments["index"], None, given=False)
            case "gathered":
                block = self._storage.gathered(self._storage.parameters_at(call.arguments["positions"]))
                block.__enter__()
                self._blocks.append(block)
            case "end of gathered":
                block = self._blocks.pop()
                try:
                    if call.arguments["write"]:
                        self._overwrite(self._storage.parameters_at(call.arguments["positions"]))
                finally:
                    block.__exit__(None, None, None)
            case _:
                getattr(self, call.name)(**call.arguments)

    # -- a step -------------------------------------------------------------------------------------------------------

    @joinable
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, replicated: Places = None, problem: str = ""
    ) -> Tensor:
        """Clip the mean gradient by its norm. Returns the norm before clipping. ``replicated``: see `ModelPart`."""
        self.averages.refuse_applied("clip_grad_norm_()")
        with self._clipping():
            parts = self._reducer.finalize_grads(
                "clip_grad_norm_()" if replicated is None else "clip_grad_norm_(over=...)",
                problem
                # the step that follows finds what a device alone shows: a look here would drain it
                or self._storage.diagnose(waits=False)
                or self._storage.diagnose_unfrozen()
                or self._user_optimizers.changed(),
                attach=None
                if replicated is not None
                else lambda are_means: self._update.clip_message(norm_type, error_if_nonfinite, are_means=are_means),
            )
            if replicated is None:
                return self._update.clip(max_norm, norm_type, error_if_nonfinite, parts)
            whole = self.model_part.whole(replicated, max_norm, norm_type, error_if_nonfinite)
            self._reducer.note_elsewhere(is_finite=whole.is_finite)
            return self._update.scale(whole.norm(), max_norm, norm_type, error_if_nonfinite)

    def clip_whole_model(self, over: Any, replicated: Replicated, *, problem: Exception | None, **clip: Any) -> Tensor:
        """Clip by the norm of a model of which the ranks of ``over`` hold further parts. Also collective among them.

        ``problem``: an error that this rank has found in its arguments; all these ranks raise one."""
        with self.model_part.over(over) as wrong, _reported(problem := problem or wrong):
            self.check()
            return self.clip_grad_norm_(**clip, **self.model_part.chosen(replicated, problem))

    def clip_together(self, others: Sequence[Engine], *, problem: Exception | None, **clip: Any) -> Tensor:
        """Clip the mean gradients of this optimizer and of further ones by their common norm, and return it.

        ``problem``: as in `clip_whole_model`."""
        self.check()
        text = None if problem is None else f"{type(problem).__name__}: {problem}"
        for engine in (self, *others):
            try:
                engine.check()
                engine.averages.refuse_applied("clip_grad_norm_()")
            except RuntimeError as error:  # perhaps of an optimizer that other ranks do not have
                text = text or str(error)
        with self._clipping(), _reported(problem):
            return clip_together(self.parts, [engine.parts for engine in others], text, **clip)

    def step(self, groups: Sequence[Options]) -> None:
        """Update every parameter that any rank used."""
        self.averages.refuse_applied("step()")
        with usable_later(), torch.no_grad(), self._joining.broadcast("step"), self._stepping():
            self._agree_and_update(groups)

    def _agree_and_update(self, groups: Sequence[Options]) -> None:
        free = self._storage.unit_hooks.end_iteration()
        problem = self._storage.diagnose() if free else "step() inside gathered() or inside a forward: leave it first"
        problem = problem or self._storage.diagnose_unfrozen() or self._user_optimizers.changed(groups)
        problem = problem or self._user_optimizers.why_no_step(groups) or self.parts.why_not_rounded(groups)
        digests = digests_of(groups, self._user_optimizers.option_names() - self._counted | self.parts.counted_steps)
        self._reducer.finalize_grads("step()", problem, options=digests)
        for watcher in self.watchers:
            watcher.before_step(self._reducer.agreement.reports)
        with as_a_whole(self._transport, "in step()", Exception):
            changed = self._update.step(groups)
        for number, options in changed.items():
            groups[number].update(options)
            self._counted.update(options)
        self.parts.count_step(groups)
        self._reducer.schedule.stepped()
        self.dicts.forget()

    # -- whole tensors ------------------------------------------------------------------------------------------------

    @joinable
    def full_grad(self, index: int) -> Tensor | None:
        """Return a copy of the whole mean gradient of a parameter; None if no rank used it."""
        return self._gradients.read(*self._storage.slot_of(index))

    def set_full_grad(self, index: int, gradient: Tensor | None, *, given: bool = True) -> None:
        """Replace the mean gradient of a parameter; None: it has none."""
        self.check()
        self.averages.refuse_applied("set_full_grad()")
        with self._joining.broadcast("set_full_grad", index=index):
            self._gradients.replace(*self._storage.slot_of(index), gradient, given=given)

    @joinable
    def full_master(self, index: int) -> Tensor:
        """Return a copy of the whole master weights of a parameter."""
        spec = self._storage.layout.parameters[index]
        self._reducer.check_consistency(f"full_master of {spec.name!r}", self._storage.diagnose())
        bucket, number = self._storage.slot_of(index)
        return gather_master(bucket, number, self.parts.shard_group.rank, self.parts.collective)

    @joinable
    def full_state_dict(self, to: int | None, masters: bool) -> dict[str, Any] | None:
        """Return the model's whole state dict on rank ``to``, or on every rank."""
        self._check_rank(to, "full_state_dict")
        problem = "full_state_dict() inside gathered(): leave it first" if self._gathered else None
        return self._full_state.gather(to, problem, masters=masters)

    def full_tensors(self, to: int | None) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the model's whole tensors on rank ``to``, or on every rank."""
        purpose = f"full_tensors(to={to})"
        self.check()
        self._check_rank(to, "full_tensors")
        return self._full_state.tensors(purpose, to, self._between_steps(purpose))

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Overwrite the model with the state dict of the first rank that has one."""
        purpose = "load_full_state_dict()"
        self.load(self._full_state.agree(state_dict, self._between_steps(purpose)), f"in {purpose}")

    @joinable
    def update_average(self, average: str) -> None:
        """Take the weights of this moment into an average. Without a message, outside `join`."""
        self.averages.update(average)

    @joinable
    def gather_average(self, average: str, to: int | None) -> dict[str, Tensor] | None:
        """Return a whole average on rank ``to``, or on every rank."""
        self._check_rank(to, "gather")
        return self.averages.gather(average, to)

    @untraced_context
    def apply_average(self, average: str) -> Iterator[None]:
        """Return a context in which the model's weights are an average."""
        purpose = f"applied() of the average {average!r}"
        with self.averages.applied(average, purpose, self._between_steps(purpose)), self.parts.streams.block():
            yield

    @untraced_context
    def gathered(self, chosen: Sequence[Tensor] | None, write: bool) -> Iterator[None]:
        """Return a context in which ``chosen`` parameters (None: all) are whole.

        With ``write`` every rank has rank 0's values after the block.
        """
        self.check()
        positions = self._storage.positions(chosen) if self._joining.active else None
        with ExitStack() as block:
            with self._joining.broadcast("gathered", positions=positions):
                block.enter_context(self._storage.gathered(chosen))
            self._gathered += 1
            try:
                with own_storages(self._storage.views(chosen)):
                    yield
            finally:
                self._gathered -= 1
                with self._joining.broadcast("end of gathered", positions=positions, write=write):
                    if write:
                        self._overwrite(chosen)

    def _overwrite(self, chosen: Sequence[Tensor] | None) -> None:
        self._reducer.check_consistency("gathered(write=True)", self._storage.diagnose())
        self._storage.overwrite(chosen)

    @joinable
    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks."""
        self._reducer.check_consistency("broadcast_buffers()", self._storage.diagnose())
        self._storage.broadcast_buffers()

    @joinable
    def check_replicas(self) -> str:
        """Compare the parameters over the ranks, and return the SHA-256 over them."""
        self._reducer.check_consistency("check_replicas()", self._storage.diagnose())
        return compare(self._transport, self._storage.fingerprints(), "check_replicas()")

    def load(self, read: Callable[[], None], doing: str = "in restore()") -> None:
        """Let ``read`` overwrite all parameters and states, when all ranks have agreed to it."""
        self.before_load()
        self._storage.loading()
        with usable_later(), torch.no_grad(), as_a_whole(self._transport, doing, Exception):
            read()
        self._storage.stepped()
        self.dicts.forget()

    def before_load(self) -> None:
        """Return when all states may change. Local."""
        for watcher in self.watchers:
            for bucket in self._storage.buckets:
                watcher.before_update(bucket.spec.index)

    # -- modes ------------------------------------------------------------------------------------------------------

    @untraced
    def set_mode(self, groups: Sequence[Options], mode: Mode) -> None:
        """Exchange the weights for those of a mode, by the classes that have modes. Local if they are these."""
        self.check()
        if self._user_optimizers.modes(groups) == {mode}:
            return
        purpose = f"{mode}()"
        problem = self._between_steps(purpose) or self._storage.diagnose() or self._user_optimizers.changed(groups)
        self._reducer.check_consistency(purpose, problem)
        with usable_later(), torch.no_grad(), as_a_whole(self._transport, f"in {purpose}", Exception):
            changed = self._update.set_mode(groups, mode)
        for number, options in changed.items():
            groups[number].update(options)
        self.dicts.forget()

    def check_modes(self) -> None:
        """Let forwards of the module be checked from now on, if a class has modes. Local."""
        if self._mode_check is None and self.parts.module is not None and self._user_optimizers.with_modes():
            self._mode_check = nn.Module.register_forward_pre_hook(self.parts.module, ModeCheck(self))

    def wrong_mode(self, wanted: Mode) -> Mode | None:
        """Return the mode of the weights if it is not the ``wanted`` one. Local."""
        if self._closed or self.parts.superseded or self.averages.in_use:
            return None
        return next(iter(self._user_optimizers.modes() - {wanted, None}), None)

    @joinable
    def zero_grad(self, set_to_none: bool) -> None:
        """Clear every gradient. Local, but every rank must make the call."""
        self._reducer.zero_grad(set_to_none)

    # -- facts and messages -----------------------------------------------------------------------------------------

    @joinable
    def consolidate_state_dict(self, to: int | None) -> None:
        """Send all states to rank ``to``, or to every rank."""
        self._check_rank(to, "consolidate_state_dict")
        purpose = f"consolidate_state_dict(to={to})"
        self._reducer.check_consistency(purpose)
        self.dicts.consolidate(to, purpose)

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum of every rank's ``value``."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            rank = self._transport.rank
            raise TypeError(f"rank {rank}: sum_over_ranks() adds up numbers, not {value!r}; .item() is one")
        values = [json.loads(data) for data in self.exchange(json.dumps(value).encode()) if data]
        return sum(values) if all(isinstance(each, int) for each in values) else math.fsum(values)

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        self.check()
        given: Any = data
        if not isinstance(given, (bytes, bytearray)):
            rank = self._transport.rank
            raise TypeError(f"rank {rank}: exchange() sends bytes, not a {type(given).__name__}: .encode() makes some")
        with self._joining.broadcast("exchange"):
            return self._transport.exchange(data, Tag(Kind.EXCHANGE, "exchange()"))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def agree_to_save(self, problem: str | None, message: bytes) -> list[bytes]:
        """Return every rank's ``message``, in rank order, if all ranks may save now.

        Raises the same error on every rank otherwise. ``problem``: an error that this rank found.
        """
        return self._agree("save()", "which are no part of a checkpoint", problem, message)

    def reset_states(self, groups: Sequence[Options], chosen: Sequence[Tensor] | None) -> None:
        """Forget the states of ``chosen`` parameters (None: all)."""
        problem = self._between_steps("reset_states()")
        indices = agree_to_forget(self._reducer, self._storage, chosen, problem)
        self.before_load()
        with usable_later():
            forget_states(self._storage, self._user_optimizers, groups, indices)
        self.dicts.forget()

    def agree_to_load(self, purpose: str) -> None:
        """Return if all ranks may load now. Raises the same error, which names ``purpose``, on every rank otherwise."""
        names = self._agree(purpose, "which are those of other weights", None, self.averages.names())
        self.averages.compare(names)

    def _agree(self, purpose: str, why_not: str, problem: str | None, message: bytes) -> list[bytes]:
        """Return every rank's ``message``. ``why_not``: why gradients that no step has used are refused."""
        problem = self._between_steps(purpose, problem)
        if problem is None and self._reducer.has_new_gradients:
            problem = f"{purpose} with gradients that no step has used, {why_not}: call it after step() or zero_grad()"
        records = self._reducer.check_consistency(purpose, problem or self._storage.diagnose(), message=message)
        return [record.attachment for record in records]

    def offload(self) -> None:
        """Move all but gradients from the device to the host."""
        problem = self._between_steps("offload()")
        if self._reducer.has_new_gradients or not self._reducer.schedule.is_open:
            problem = problem or "offload() with gradients, which do not move: call zero_grad() first"
        try:
            self._agree("offload()", "which do not move", problem or self._memory.copy_to_host(), b"")
        except Exception:
            self._memory.forget()
            raise
        self.before_load()
        self._memory.offload()

    def reload(self) -> None:
        """Undo `offload`."""
        self._check_not_closed()
        self._transport.check_process()
        self._memory.reload()

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return bool(self._closed)

    def close(self) -> None:
        """Make the model plain again. Warns of values that are lost."""
        self._transport.check_process()
        if self._storage.unit_hooks.busy() or self._joining.active:
            raise RuntimeError("close() inside a forward, inside a backward or inside join(): leave it first")
        if not (self._transport.broken or self.parts.superseded):
            self._memory.reload()  # if a rank has no room, none has become plain
        try:
            self._memory.reload_alone()
            if (lost := self._lost()) is not None:
                warnings.warn(f"close(): {lost}", RuntimeWarning, stacklevel=3)
        finally:
            self._closed = "its parameters could not be gathered any more"
            with usable_later():
                self.parts.make_plain()
            if self._mode_check is not None:
                self._mode_check.remove()
            self._memory.forget()
            self.state.close()
            self._transport.pool.trim()
            self.parts.shard_group.pool.trim()
            self._closed = "the model is plain again"

    def _lost(self) -> str | None:
        """Return a text that names the values that close() loses or cannot make plain; None if there are none."""
        if self.parts.superseded:
            return f"{TAKEN_OVER}, and keeps them"
        names = self._storage.replaced()
        try:
            if not self._transport.broken:
                self._reducer.check_consistency("close()", self._storage.diagnose())
        except CollectiveError:
            raise
        except (RuntimeError, ValueError) as error:
            of = f"; lost: the values that this optimizer gave {', '.join(map(repr, names))}" if names else ""
            return f"{error}{of}"
        return None


@contextmanager
def _reported(problem: Exception | None) -> Iterator[None]:
    """Raise ``problem``, of which all ranks know, instead of the text that they raise."""
    try:
        yield
    except RuntimeError as error:
        if problem is None or isinstance(error, CollectiveError):
            raise
        raise problem from None
