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
    from torch.distributed import ProcessGroup  # noqa: TID251 - the type alone
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - the type alone

    from collectives import Transport


class _Clipping(Protocol):
    model_part: ModelPart

    def clip_grad_norm_(self, *, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor: ...

    def clip_whole_model(self, over: Any, replicated: Replicated, **clip: Any) -> Tensor: ...

    def clip_together(self, others: Sequence[Any], **clip: Any) -> Tensor: ...


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
        over: ProcessGroup | Transport | DeviceMesh | None = None,
        replicated: Replicated = (),
        also: Iterable[WithClip] = (),
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
            replicated: the parameters that each rank of ``over`` has, under one name and with the same gradient, or a
                predicate (name, parameter) -> bool. Each counts once. `ValueError` names one whose gradients differ.
            also: further `ZeroOptimizer`s of this rank, over groups of ranks that lie inside this one's group (over the
                experts of an expert-parallel group, say). The norm is that of all their gradients together, on all
                ranks, and all are scaled. Every rank gives equally many; not inside `join`, nor with ``over``.
                `ValueError` if such a group has ranks outside of this one's.
        """
        max_norm, norm_type = check_norm_arguments(max_norm, norm_type)
        clip: Any = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        if others := further_engines(self, also):
            if over is not None:
                raise ValueError("clip_grad_norm_() takes over= or also=: a model in parts has one optimizer per rank")
            self._engine.model_part.warn_of_others()
            return self._engine.clip_together(others, **clip)
        if over is None:
            self._engine.model_part.warn_of_others()
            return self._engine.clip_grad_norm_(**clip)
        return self._engine.clip_whole_model(over, replicated, **clip)


def further_engines(first: WithClip, also: Iterable[Any]) -> list[Any]:
    """Return the engines of further optimizers. Raises `TypeError` if one is none, the first one, or there twice."""
    found: list[WithClip] = []
    for number, other in enumerate(also):
        if not isinstance(other, WithClip) or any(other is known for known in (first, *found)):
            raise TypeError(f"also[{number}] must be a further ZeroOptimizer, each once, not {type(other).__name__}")
        found.append(other)
    return [each._engine for each in found]
