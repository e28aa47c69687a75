"""The commands of `zero` as typer has them.

Knows: their names and a line about each, the flags that were renamed, and how typer takes the flags of settings
(`flags`). Does not know: what the commands do. The modules of a command, and torch with them, are imported if it is the
one that is called.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from .help import GroupedCommand
from .runner import checking_input, reports_errors

if TYPE_CHECKING:
    from .flags import Flag

SETTINGS: dict[str, Any] = {
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,  # rich's tables of flags cut their names short
}
COMMANDS = {  # name -> class of its settings, help
    "train": ("TrainConfig", "Train a byte-level GPT on real text, on any number of ranks."),
    "plan": (
        "PlanConfig",
        "Plan a model on a cluster: memory per rank, seconds per step, and the setting to take.",
    ),
    "verify": (
        "VerifyConfig",
        "Train your model at each stage and number of ranks, and find the first bit that differs from the plain loop.",
    ),
}
CHECKPOINT = "Inspect checkpoints, and convert them to other formats. Needs no ranks."
OF_CHECKPOINT = ("list", "verify", "export")
RENAMED = {"plan --checkpoint": "--recompute"}


def application(called: str | None) -> typer.Typer:
    """Return the commands of `zero`. Only the one that is ``called`` has flags, and can run."""
    made = typer.Typer(help="Train with ZeroOptimizer, and prove it.", add_completion=False, **SETTINGS)
    made.callback()(_options)
    for name, (settings, text) in COMMANDS.items():
        if name == called:
            _add_with_flags(made, name, settings, text)
        else:
            _add(made, name, text, _not_called)
    made.add_typer(_checkpoints(called == "checkpoint"), name="checkpoint")
    return made


def _checkpoints(called: bool) -> typer.Typer:
    """Return the commands of `zero checkpoint`: as they are if one is called, else their names."""
    made = typer.Typer(help=CHECKPOINT, short_help=CHECKPOINT, **SETTINGS)
    module = importlib.import_module(".checkpoint.command", __package__) if called else None
    for name in OF_CHECKPOINT:
        run, examples = (_not_called, ()) if module is None else module.COMMANDS[name]
        _add(made, name, " ".join((run.__doc__ or "").split()), run, examples)
    return made


def _show_version(asked: bool) -> None:
    if asked:
        print(f"zero {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")


def _options(version: Annotated[bool, VERSION] = False) -> None:
    """Take the flags of `zero` itself."""


def _not_called() -> int:
    raise AssertionError("a command was found whose name is not the first word of the command line")


def _add(group: typer.Typer, name: str, text: str, run: Callable[..., int], examples: Sequence[str] = ()) -> None:
    """Add a function to a group as a command. ``text``: its help."""
    group.command(
        name,
        cls=GroupedCommand,
        help=text,
        short_help=text,
        epilog="\n".join(examples),
        context_settings=SETTINGS["context_settings"],
    )(run)


def _add_with_flags(group: typer.Typer, name: str, settings: str, text: str) -> None:
    """Add the command ``name`` with a flag for each field of its settings."""
    from .flags import flags_of, from_flags

    config = getattr(importlib.import_module(f".{name}.settings", __package__), settings)

    @reports_errors
    def command(**values: Any) -> int:
        with checking_input(ValueError):
            given = from_flags(config, values)
        code: int = importlib.import_module(f".{name}.command", __package__).run(given)
        return code

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(flag) for flag in sorted(flags_of(config), key=lambda flag: list(config.GROUPS).index(flag.group))]
    )
    _add(group, name, text, command, config.EXAMPLES)


def _parameter(flag: Flag) -> inspect.Parameter:
    """Return the parameter of a function that typer reads as this flag; without a default it is an argument."""
    if flag.default is MISSING:
        info, default = typer.Argument(metavar=flag.metavar, help=flag.help), inspect.Parameter.empty
    else:
        info = typer.Option(metavar=flag.metavar, help=flag.help, rich_help_panel=flag.group)
        default = flag.default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(flag.name, kind, default=default, annotation=Annotated[flag.type, info])
