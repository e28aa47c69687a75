"""The commands of `zero` as typer has them.

Knows: their names, and how typer takes the flags of settings (`flags`). Does not know: what the commands do. Training
and planning are imported when they run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .checkpoint import command as checkpoint
from .flags import flags_of, from_flags
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


def _add(group: typer.Typer, name: str, run: Callable[..., int]) -> None:
    """Add a function to a group as a command, whose help is its docstring."""
    text = " ".join((run.__doc__ or "").split())
    group.command(name, help=text, short_help=text, context_settings=HELP_FLAGS)(run)


def _with_flags(name: str, config: type[Any], text: str) -> Callable[..., int]:
    """Return the command ``name`` with a flag for each field of its settings. ``text``: its help."""

    @reports_errors
    def command(**values: Any) -> int:
        with checking_input(ValueError):
            settings = from_flags(config, values)
        code: int = importlib.import_module(f"{__package__}.{name}.command").run(settings)
        return code

    parameters = [
        inspect.Parameter(
            flag.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=flag.default,
            annotation=Annotated[flag.type, typer.Option(help=flag.help)],
        )
        for flag in flags_of(config)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = text
    return command


TRAIN = "Train a byte-level GPT on real text, on any number of ranks."
PLAN = "Say what a model costs on a cluster: memory of a rank, seconds of a step, and which setting to take."
_add(application, "train", _with_flags("train", TrainConfig, TRAIN))
_add(application, "plan", _with_flags("plan", PlanConfig, PLAN))
_add(application, "verify", verify.run)
_add(checkpoints, "list", checkpoint.list_)
_add(checkpoints, "verify", checkpoint.verify)
_add(checkpoints, "export", checkpoint.export)
application.add_typer(checkpoints, name="checkpoint")
