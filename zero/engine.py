"""Carries out the calls of an optimizer on one rank.

Knows: the order of operations in a call, and what ranks agree on before it. The parts do the work: `setup` (registers
parameters), `storage` and `sharded` (hold parameters), `reducer` (gradients to means), `update` (clip and step),
`user_optimizers` (the user's classes), `plain_dicts`. The calls about whole tensors are in `whole_tensor_calls`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from collectives import CollectiveError, Kind, Tag, as_a_whole

from .gradients.join import Call, adopt_options, digests_of
from .joint_clip import clip_together
from .parts import Parts
from .runtime.compiled_calls import untraced, untraced_context
from .runtime.flat_states import Options
from .runtime.profiler_ranges import LOG, ProfilerRange
from .state.device_memory import DeviceMemory
from .state.live_states import States, agree_to_forget, forget_states
from .state.modes import ModeCheck
from .step.model_parallel import ModelPart, Places, Replicated
from .step.user_optimizer import Mode
from .whole_tensor_calls import TAKEN_OVER, WholeTensorCalls, joinable


class Engine(WholeTensorCalls):
    """One optimizer on one rank. Every method is collective unless it is marked as local."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
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
                "clip_grad_norm_()",
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
        with torch.no_grad(), self._joining.broadcast("step"), self._stepping():
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

    # -- modes ------------------------------------------------------------------------------------------------------

    @untraced
    def set_mode(self, groups: Sequence[Options], mode: Mode) -> None:
        """Exchange the weights for those of a mode, by the classes that have modes. Local if they are these."""
        self.check()
        if self._user_optimizers.modes(groups) == {mode}:
            return
        purpose = f"{mode}()"
        self._check_between_steps(purpose)
        problem = None if self._is_free() else f"{purpose} inside gathered() or inside a forward: leave it first"
        problem = problem or self._storage.diagnose() or self._user_optimizers.changed(groups)
        self._reducer.check_consistency(purpose, problem)
        with torch.no_grad(), as_a_whole(self._transport, f"in {purpose}", Exception):
            changed = self._update.set_mode(groups, mode)
        for number, options in changed.items():
            groups[number].update(options)
        self.dicts.forget()

    def check_modes(self) -> None:
        """Let forwards of the module be checked from now on, if a class has modes. Local."""
        if self._mode_check is None and self.parts.module is not None and self._user_optimizers.with_modes():
            self._mode_check = self.parts.module.register_forward_pre_hook(ModeCheck(self))

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
        self._check_between_steps("reset_states()")
        problem = None if self._is_free() else "reset_states() inside gathered() or inside a forward: leave it first"
        indices = agree_to_forget(self._reducer, self._storage, chosen, problem)
        self.before_load()
        forget_states(self._storage, self._user_optimizers, groups, indices)
        self.dicts.forget()

    def agree_to_load(self, purpose: str) -> None:
        """Return if all ranks may load now. Raises the same error, which names ``purpose``, on every rank otherwise."""
        names = self._agree(purpose, "which are those of other weights", None, self.averages.names())
        self.averages.compare(names)

    def _agree(self, purpose: str, why_not: str, problem: str | None, message: bytes) -> list[bytes]:
        """Return every rank's ``message``. ``why_not``: why gradients that no step has used are refused."""
        self._check_between_steps(purpose)
        if problem is None and not self._is_free():
            problem = f"{purpose} inside gathered() or inside a forward: leave it first"
        if problem is None and self._reducer.has_new_gradients:
            problem = f"{purpose} with gradients that no step has used, {why_not}: call it after step() or zero_grad()"
        records = self._reducer.check_consistency(purpose, problem or self._storage.diagnose(), message=message)
        return [record.attachment for record in records]

    def offload(self) -> None:
        """Move all but gradients from the device to the host."""
        self._check_between_steps("offload()")
        has_gradients = self._reducer.has_new_gradients or not self._reducer.schedule.is_open
        problem = "offload() with gradients, which do not move: call zero_grad() first" if has_gradients else None
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
