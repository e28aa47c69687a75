"""The command line `zero COMMAND`; also `python -m zero.train` and `python -m zero.verify`, each of one command.

Knows: the commands, and how typer makes flags of the fields of their settings. Does not know: what the commands do.
Without the `cli` extra it prints what to install.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from .console import INSTALL_HINT
from .flags import flags_of
from .plan.settings import PlanConfig
from .runner import WRONG_INPUT, checking_input, fail, reports_errors
from .train.settings import TrainConfig

__all__ = ["main"]

NEEDED = ("typer", "rich")
HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
HELP = {
    "train": "Train a byte-level GPT on real text, on any number of ranks.",
    "plan": "Say what a model costs on a cluster: memory of a rank, seconds of a step, and which setting to take.",
    "verify": "Find where your own model, at each stage and number of ranks, first leaves the bits of your plain loop.",
    "checkpoint": "Look at checkpoints, and convert them to other formats. Needs no ranks.",
}
HELP_CHECKPOINT = {
    "list": "Print step, bytes, writer and content of each checkpoint of a folder, and whether its files are complete.",
    "verify": "Read every byte of a checkpoint, or of each one in a folder. If one is not whole, name file and tensor, "
    "and end with 1.",
    "export": "Write a checkpoint in another format: torch (one file, which torch.load reads with weights_only=True: "
    "model, optimizer, state), hf (a transformers folder: the model alone), dcp (torch.distributed.checkpoint: model "
    "and flattened optimizer).",
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
        remedy = f"See `{path} --help`"
        if parser is group and arguments[0] in HELP_CHECKPOINT.keys() - HELP.keys():
            remedy = f"It is `{path} checkpoint {arguments[0]}`"
        said = error.format_message()
        fail(f"{said}{'' if said.endswith(('.', '?')) else '.'} {remedy}")
        return WRONG_INPUT
    return code


def _application() -> Any:
    import typer

    application = typer.Typer(
        help="Train with ZeroOptimizer, and prove it.",
        add_completion=False,
        context_settings=HELP_FLAGS,
        rich_markup_mode=None,  # rich's tables of flags cut their names short
    )
    commands = {
        "train": _command(TrainConfig, _train),
        "plan": _command(PlanConfig, _plan),
        "verify": _verify_command(),
    }
    for name, command in commands.items():
        application.command(name, help=HELP[name], short_help=HELP[name], context_settings=HELP_FLAGS)(command)
    application.add_typer(_checkpoint_application(), name="checkpoint")
    return application


def _command(config: type[Any], run: Callable[[Any], int]) -> Any:
    """Make a command with a flag for each field of ``config``."""
    import typer

    @reports_errors
    def command(**values: Any) -> int:
        with checking_input(ValueError):
            settings = config(**values)
        return run(settings)

    return _with_parameters(
        command,
        {flag.name: Annotated[flag.type, typer.Option(help=flag.help)] for flag in flags_of(config)},
        {flag.name: flag.default for flag in flags_of(config)},
    )


def _with_parameters(run: Callable[..., int], annotations: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """Make a function with these keyword arguments, which typer turns into arguments and flags."""

    def called(**values: Any) -> int:
        return run(**values)

    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, inspect.Parameter.empty), annotation=of
            )
            for name, of in annotations.items()
        ]
    )
    return called


def _checkpoint_application() -> Any:
    import typer

    from .checkpoint import command

    def path(name: str, text: str) -> Any:
        return Annotated[Path, typer.Argument(metavar=name, help=text)]

    text = HELP["checkpoint"]
    application = typer.Typer(help=text, short_help=text, context_settings=HELP_FLAGS, rich_markup_mode=None)
    to = Annotated[Literal["torch", "hf", "dcp"], typer.Option(help="the format")]
    out = path("OUT", "where nothing is yet")
    commands: dict[str, tuple[Callable[..., int], dict[str, Any]]] = {
        "list": (command.list_, {"directory": path("DIR", "a folder of checkpoints")}),
        "verify": (command.verify, {"path": path("PATH", "a checkpoint, or a folder of them")}),
        "export": (command.export, {"path": path("PATH", "a checkpoint"), "to": to, "out": out}),
    }
    for name, (run, parameters) in commands.items():
        text = HELP_CHECKPOINT[name]
        application.command(name, help=text, short_help=text, context_settings=HELP_FLAGS)(
            _with_parameters(run, parameters, {})
        )
    return application


def _train(config: TrainConfig) -> int:
    from .train.command import run

    return run(config)


def _plan(config: PlanConfig) -> int:
    from .plan.command import run

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
