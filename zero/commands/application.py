"""The commands of `zero` as typer has them.

Knows: their names, and how typer makes flags of the fields of settings: a field is a flag, the text in its type is its
help. Does not know: what the commands do. Training and planning are imported when they run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from .checkpoint import command as checkpoint
from .plan.settings import PlanConfig
from .runner import checking_input, reports_errors
from .train.settings import TrainConfig
from .verify import command as verify

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
CHECKPOINT = "Look at checkpoints, and convert them to other formats. Needs no ranks."

application = typer.Typer(
    help="Train with ZeroOptimizer, and prove it.",
    add_completion=False,
    context_settings=HELP_FLAGS,
    rich_markup_mode=None,  # rich's tables of flags cut their names short
)
checkpoints = typer.Typer(help=CHECKPOINT, short_help=CHECKPOINT, context_settings=HELP_FLAGS, rich_markup_mode=None)


def _command(group: typer.Typer, name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add a function to a group as a command, whose help is its docstring."""

    def add(run: Callable[..., int]) -> Callable[..., int]:
        text = " ".join((run.__doc__ or "").split())
        group.command(name, help=text, short_help=text, context_settings=HELP_FLAGS)(run)
        return run

    return add


def _flags(config: type[Any]) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Give a function of settings a flag for each field of ``config``."""
    hints = get_type_hints(config, include_extras=True)

    def with_flags(run: Callable[[Any], int]) -> Callable[..., int]:
        @reports_errors
        def command(**values: Any) -> int:
            with checking_input(ValueError):
                settings = config(**values)
            return run(settings)

        parameters = []
        for each in fields(config):
            of, text = get_args(hints[each.name])
            parameters.append(
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=each.default,
                    annotation=Annotated[of, typer.Option(help=text)],
                )
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__doc__ = run.__doc__
        return command

    return with_flags


@_command(application, "train")
@_flags(TrainConfig)
def train(config: TrainConfig) -> int:
    """Train a byte-level GPT on real text, on any number of ranks."""
    from .train.command import run

    return run(config)


@_command(application, "plan")
@_flags(PlanConfig)
def plan(config: PlanConfig) -> int:
    """Say what a model costs on a cluster: memory of a rank, seconds of a step, and which setting to take."""
    from .plan.command import run

    return run(config)


_command(application, "verify")(verify.run)
_command(checkpoints, "list")(checkpoint.list_)
_command(checkpoints, "verify")(checkpoint.verify)
_command(checkpoints, "export")(checkpoint.export)
application.add_typer(checkpoints, name="checkpoint")
