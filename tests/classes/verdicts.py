"""How a class is sharded and whether with the bits of the plain loop, or why it is refused.

A class trains two ranks at stage 3, and three at stage 2 with a clip, each a process. Their parameters and states are
compared with those of the plain loop. What is not element-wise is tried with ``partition="block"``, too. If the plain
loop raises, an optimizer is built all the same, for its error. Steps that classes compile run eagerly.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import ZeroOptimizer
from zero.core.parameter_specs import flattened

from ..support.loops import seeded
from ..support.plain import bits
from ..support.pool import GlooPool, ProgramError
from ..support.sides import AsPlain, OnRank, Side, train
from ..support.trials import remember
from .uses import IMAGES, MODELS, class_of, use_of

TOGETHER = 6  # micro-batches of a step
RUNS = ((3, 2, 0.5), (2, 3, None))  # ranks, stage, and the norm to which gradients are clipped
LIMIT = 200.0  # seconds of a run on all ranks
REMEMBERED: list[str] = []  # in a process of the pool: that it remembers trials


@dataclass(frozen=True)
class Trained:
    """What a side ends with. ``said``: why a class is not sharded by elements. ``error``: what was raised.

    ``digests``: of each parameter and state, by its name. ``owned``: the number of parameters that have one owner each.
    ``unsaved``: why the states cannot be saved; empty if they can.
    """

    digests: dict[str, str] = field(default_factory=dict)
    said: str = ""
    owned: int = 0
    unsaved: str = ""
    error: str = ""
    built: bool = False


@dataclass(frozen=True)
class Verdict:
    """``kind``: how a class is sharded ("elements", "blocks", "parameter"), "refused", or "fails", as no class must.

    ``model``: which one it trains. ``differs``: where bits differ; empty: nowhere. ``why``: it is refused, or is not
    sharded more finely.
    """

    name: str
    kind: str
    model: str = ""
    differs: str = ""
    why: str = ""
    unsaved: str = ""


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def batches_of(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(IMAGES, generator=generator) for _ in range(TOGETHER)]


def take_steps(side: Side, steps: int, max_norm: float | None) -> None:
    """Train on a side. If the class has two modes, do so in train mode, and end in eval mode."""
    has_modes = all(callable(getattr(side.optimizer, mode, None)) for mode in ("train", "eval"))
    if has_modes:
        side.set_mode("train")
    train(side, range(steps), batches_of, loss_of, max_norm)
    if has_modes:
        side.set_mode("eval")


def line_of(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def digests(value: Any, name: str) -> dict[str, str]:
    """Return a digest of each tensor in nested values, and the text of what else is there."""
    if isinstance(value, Tensor):
        inner, facts = flattened(value)
        if inner:
            return {name: f"{type(value)} {facts}", **digests({key: getattr(value, key) for key in inner}, name)}
        return {name: f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits(value).numpy()).hexdigest()}"}
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        found = [digests(inside, f"{name}, {key}") for key, inside in pairs if inside is not None]
        return {key: digest for each in found for key, digest in each.items()}
    return {name: repr(value) if isinstance(value, bool | int | float | str) else str(type(value))}


def plainly(name: str, model: str, max_norm: float | None) -> Trained:
    """Train in the plain loop."""
    use, trained = use_of(name), seeded(5, MODELS[model])
    groups = use.groups(trained) if use.groups else None
    try:
        side = AsPlain(trained, lambda updated: class_of(name)(groups or updated, **use.arguments), 1, None, TOGETHER)
        take_steps(side, use.steps, max_norm)
        updated = [p for group in side.optimizer.param_groups for p in group["params"]]
        states = {number: side.optimizer.state[p] for number, p in enumerate(updated)}
    except Exception as error:
        return Trained(error=line_of(error))
    return Trained({**digests(dict(trained.named_parameters()), "parameter"), **digests(states, "state")}, built=True)


def on_rank(
    group: Any, _: int, name: str, model: str, stage: int, max_norm: float | None, partition: str | None
) -> Trained:
    """Train on a rank, a process of the pool."""
    if not REMEMBERED:
        remember(pytest.MonkeyPatch())
        torch.compiler.set_stance("force_eager")
        REMEMBERED.append("trials")
    use, trained, built = use_of(name), seeded(5, MODELS[model]), False
    settings: dict[str, Any] = {"stage": stage, "divisor": TOGETHER, "partition": partition, "bucket_cap_mb": 2e-3}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer = ZeroOptimizer(
                use.groups(trained) if use.groups else trained,
                class_of(name),
                module=trained,
                process_group=group,
                **settings,
                **use.arguments,
            )
            built = True
            take_steps(OnRank(trained, optimizer), use.steps, max_norm)
            optimizer.check_replicas()
            states, unsaved = states_of(optimizer)
            owned = re.search(r"by parameter: (\d+) parameters", str(optimizer.describe()))
            optimizer.close()
        except Exception as error:
            return Trained(error=line_of(error), built=built)
    said = [str(warned.message) for warned in caught if "is not element-wise" in str(warned.message)]
    found = {**digests(dict(trained.named_parameters()), "parameter"), **states}
    return Trained(found, (said or [""])[0], int(owned[1]) if owned else 0, unsaved, built=True)


def states_of(optimizer: ZeroOptimizer) -> tuple[dict[str, str], str]:
    """Return the digests of a class's states, or none and the reason why they cannot be saved."""
    try:
        optimizer.consolidate_state_dict(None)
    except TypeError as error:
        return {}, line_of(error)
    return digests(optimizer.state_dict()["state"], "state"), ""


def difference(ours: Trained, theirs: Trained) -> str:
    """Return the first parameter or state that differs; empty if none does."""
    names = [*theirs.digests, *(ours.digests.keys() - theirs.digests.keys())]
    if ours.unsaved:
        names = [name for name in names if name.startswith("parameter")]
    return next((name for name in names if ours.digests.get(name) != theirs.digests.get(name)), "")


def ranks(pool: GlooPool, name: str, model: str, partition: str | None, expected: list[Trained]) -> Verdict:
    """Train on ranks, and compare with what the plain loop ends with in each of `RUNS`."""
    why, owned, unsaved = "", 0, ""
    for (count, stage, max_norm), plain in zip(RUNS, expected, strict=True):
        try:
            found = pool.run(on_rank, name, model, stage, max_norm, partition, ranks=range(count), limit=LIMIT)
        except (ProgramError, TimeoutError, RuntimeError) as error:
            pool.stop()
            return Verdict(name, "fails", model, why=line_of(error))
        if any("no answer" in each.error for each in found):
            pool.stop()
        for each in found:
            if each.error:
                return Verdict(name, "fails" if each.built else "refused", model, why=each.error)
            owned, why, unsaved = each.owned, why or each.said, each.unsaved
            if not plain.error and (differs := difference(each, plain)):
                return Verdict(name, kind_of(owned, plain), model, f"{count} ranks: {differs}", why)
    return Verdict(name, kind_of(owned, plain), model, why=why, unsaved=unsaved)


def kind_of(owned: int, plain: Trained) -> str:
    """Return how a class is sharded of which so many parameters have one owner each."""
    if owned == 0:
        return "elements"
    return "blocks" if owned < sum(name.startswith("parameter") for name in plain.digests) else "parameter"


def verdict_on(pool: GlooPool, name: str) -> Verdict:
    """Try a class with the first of the models that its plain loop trains."""
    problems = []
    for model in MODELS:
        expected = [plainly(name, model, max_norm) for _, _, max_norm in RUNS]
        problems += [each.error for each in expected if each.error][:1]
        if not any(each.error for each in expected):
            break
    else:
        found = ranks(pool, name, next(iter(MODELS)), None, expected)
        return Verdict(name, found.kind, "", why=f"plain loop: {' / '.join(problems)} / ranks: {found.why}")
    found = ranks(pool, name, model, None, expected)
    if found.kind != "parameter" or found.differs:
        return found
    by_blocks = ranks(pool, name, model, "block", expected)
    return found if by_blocks.kind in ("refused", "parameter") else replace(by_blocks, why=by_blocks.why or found.why)
