"""The public call that clips: `WithClip`.

Knows: the user's arguments. Does not know: the order of operations in a clip, which is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..runtime.compiled_calls import untraced_methods
from .clip import check_norm_arguments
from .model_parallel import ModelPart, Replicated

if TYPE_CHECKING:
    from .model_parallel import Group


_NONE: Replicated = ()  # the default: any other value needs over=


class _Clipping(Protocol):
    model_part: ModelPart

    def clip_grad_norm_(self, *, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor: ...

    def clip_whole_model(
        self, over: Any, replicated: Replicated, *, problem: Exception | None, **clip: Any
    ) -> Tensor: ...

    def clip_together(self, others: Sequence[Any], *, problem: Exception | None, **clip: Any) -> Tensor: ...


@untraced_methods
class WithClip:
    """An optimizer that clips by the norm of its parameters, of a model of which these are a part, or of those of
    several optimizers."""

    _engine: _Clipping

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        over: Group | Sequence[Group] | None = None,
        replicated: Replicated = _NONE,
        also: Iterable[WithClip] | None = None,
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
            others = further_engines(self, () if also is None else also)
            if over is None and replicated is not _NONE:
                raise ValueError(
                    "clip_grad_norm_(replicated=...) is about parameters that each rank of over= has: pass over=, too"
                )
            if over is not None and also is not None:
                raise ValueError("clip_grad_norm_() takes over= or also=: a model in parts has one optimizer per rank")
        except Exception as error:
            if over is None and also is None:
                raise
            problem, others = error, []  # other ranks wait for this one: they must know
        clip: Any = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        if over is not None:
            return self._engine.clip_whole_model(over, replicated, problem=problem, **clip)
        self._engine.model_part.warn_of_others()
        if also is None:
            return self._engine.clip_grad_norm_(**clip)
        return self._engine.clip_together(others, problem=problem, **clip)


def further_engines(first: WithClip, also: Any) -> list[Any]:
    """Return the engines of further optimizers. Raises `TypeError` if ``also`` is no list of these, or if one is the
    first one, or there twice."""
    if not isinstance(also, Iterable):
        raise TypeError(f"also must be a list of further ZeroOptimizers, not a {type(also).__name__}")
    found: list[WithClip] = []
    for number, other in enumerate(also):
        if not isinstance(other, WithClip) or any(other is known for known in (first, *found)):
            raise TypeError(f"also[{number}] must be a further ZeroOptimizer, each once, not {type(other).__name__}")
        found.append(other)
    return [each._engine for each in found]
