"""The command line `zero COMMAND`; also `python -m zero.train` and `python -m zero.verify`, each of one command.

Knows: the commands, and how typer makes flags of the fields of their settings. Does not know: what the commands do.
Without the `cli` extra it prints what to install.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from .console import INSTALL_HINT
from .runner import fail, reports_errors
from .train.settings import SweepConfig, TrainConfig, flags_of

__all__ = ["main"]

NEEDED = ("typer", "rich")
USAGE_ERROR = 2
HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
HELP = {
    "train": "Train a byte-level GPT on real text, on any number of ranks.",
    "sweep": "Measure memory against time: every setting, and torch's own, side by side.",
    "verify": "Find where your own model, at each stage and number of ranks, first leaves the bits of your plain loop.",
}


def main(arguments: Sequence[str] | None = None, command: str | None = None) -> int:
    """Run a command and return its exit code. ``arguments``: by default those of this process. ``command``: its name;
    if None, the first argument is the name."""
    program = "zero" if command is None else f"python -m zero.{command}"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return fail(f"{program} needs {' and '.join(missing)}: {INSTALL_HINT}")
    return _run(list(sys.argv[1:] if arguments is None else arguments), program, command)


def _run(arguments: list[str], program: str, command: str | None) -> int:
    import typer

    group: Any = typer.main.get_command(_application())
    parser = group if command is None else group.commands[command]
    usage_error: Any = typer.BadParameter.__base__  # typer has no public name for it
    try:
        code: int = parser.main(arguments or ["--help"] * (parser is group), program, standalone_mode=False)
    except usage_error as error:
        path = program if error.ctx is None else error.ctx.command_path
        fail(f"{error.format_message().rstrip('.')}. See `{path} --help`")
        return USAGE_ERROR
    return code


def _application() -> Any:
    import typer

    application = typer.Typer(
        help="Train with ZeroOptimizer, and prove it.",
        add_completion=False,
        context_settings=HELP_FLAGS,
        rich_markup_mode=None,  # rich's tables of flags cut their names short
    )
    train, sweep = _command(TrainConfig, _train), _command(SweepConfig, _sweep)
    for name, command in {"train": train, "sweep": sweep, "verify": _verify_command()}.items():
        application.command(name, help=HELP[name], short_help=HELP[name], context_settings=HELP_FLAGS)(command)
    return application


def _command(config: type[TrainConfig] | type[SweepConfig], run: Callable[[Any], int]) -> Any:
    """Make a function with one keyword argument for each field of ``config``, which typer turns into flags."""
    import typer

    @reports_errors
    def run_with(values: dict[str, Any]) -> int:
        return run(config(**values))

    def command(**values: Any) -> int:
        return run_with(values)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                flag.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=flag.default,
                annotation=Annotated[flag.type, typer.Option(help=flag.help)],
            )
            for flag in flags_of(config)
        ]
    )
    return command


def _train(config: TrainConfig) -> int:
    from .train.command import run

    return run(config)


def _sweep(config: SweepConfig) -> int:
    from .sweep.command import run

    return run(config)


def _verify_command() -> Any:
    import typer

    from .verify.command import run

    def verify(function: Any) -> int:
        return run(function)

    argument = typer.Argument(
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a dict of zero.verify's; the current directory is importable",
    )
    verify.__annotations__ = {"function": Annotated[str, argument], "return": int}
    return verify


if __name__ == "__main__":
    sys.exit(main())
