"""The command line `zero COMMAND`; also `python -m zero.train` and `python -m zero.verify`, each of one command.

Knows: the names of the commands, a line about each, how typer takes their flags (`flags`), and errors of the command
line. Does not know: what the commands do. The modules of a command, and torch with them, are imported if it is the one
that is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from .. import __version__
from .console import INSTALL_HINT
from .runner import WRONG_INPUT, checking_input, exit_code_of, fail

try:
    import typer
    from typer.core import TyperCommand
except ModuleNotFoundError:
    raise SystemExit(f"error: the command line of zero needs typer: {INSTALL_HINT}") from None

SETTINGS: dict[str, Any] = {
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,  # rich's tables of flags cut their names short
}
COMMANDS = {
    "train": "Train a byte-level transformer on a text, on any number of ranks.",
    "plan": "Plan a model on a cluster: memory per rank, seconds per step, and the setting to take.",
    "verify": (
        "Train your model at each stage and number of ranks, and find the first bit that differs from the plain loop."
    ),
}
CHECKPOINT = "Inspect checkpoints, and convert them to other formats. Needs no ranks."


def application(called: str | None) -> typer.Typer:
    """Return the commands of `zero`. Only the one that is ``called`` has flags, and can run."""
    made = typer.Typer(help="Train with ZeroOptimizer, and prove it.", add_completion=False, **SETTINGS)
    made.callback()(_options)
    for name, text in COMMANDS.items():
        _add(made, name, text, *(_with_flags(name) if name == called else (_not_called, ())))
    inner: dict[str, Any] = {}
    if called == "checkpoint":
        inner = importlib.import_module(".checkpoint.command", __package__).COMMANDS
    checkpoints = typer.Typer(help=CHECKPOINT, short_help=CHECKPOINT, **SETTINGS)
    for name, (run, examples) in inner.items():
        _add(checkpoints, name, " ".join((run.__doc__ or "").split()), run, examples)
    made.add_typer(checkpoints, name="checkpoint")
    return made


def _options(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Take the flags of `zero` itself. `main` shows the version."""


def _not_called() -> int:
    raise AssertionError("a command was found whose name is not the first word of the command line")


class _Command(TyperCommand):
    """A command that returns its exit code. Its help has a section for its arguments, and one for each
    ``rich_help_panel`` of its options."""

    def invoke(self, ctx: Any) -> int:
        run = super().invoke
        return exit_code_of(lambda: run(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            group = getattr(param, "rich_help_panel", None) or "Options"
            if record := param.get_help_record(ctx):
                groups.setdefault("Arguments" if param.param_type_name == "argument" else group, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _add(group: typer.Typer, name: str, text: str, run: Callable[..., int], examples: Sequence[str] = ()) -> None:
    """Add a function to a group as a command. ``text``: its help."""
    epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples)]) if examples else None
    more = {"epilog": epilog, "context_settings": SETTINGS["context_settings"]}
    group.command(name, cls=_Command, help=text, short_help=text, **more)(run)


def _with_flags(name: str) -> tuple[Callable[..., int], Sequence[str]]:
    """Return a command with a flag for each field of its settings, and its examples."""
    from .flags import signature_of

    module = importlib.import_module(f".{name}.command", __package__)
    config = getattr(module, f"{name.capitalize()}Config")

    def command(**values: Any) -> int:
        with checking_input(ValueError):
            given = config(**{field: value for field, value in values.items() if value is not None})
        code: int = module.run(given)
        return code

    command.__signature__ = signature_of(config)  # type: ignore[attr-defined]
    return command, config.EXAMPLES


def main(arguments: Sequence[str] | None = None, command: str | None = None) -> int:
    """Run a command and return its exit code. ``arguments``: by default those of this process. ``command``: its name;
    if None, the first argument is the name."""
    program = "zero" if command is None else f"python -m zero.{command}"
    words = list(sys.argv[1:] if arguments is None else arguments)
    if command is None and "--version" in words[:1]:
        print(f"zero {__version__}")
        return 0
    called = command or next((word for word in words if not word.startswith("-")), None)
    group: Any = typer.main.get_command(application(called))
    parser = group if command is None else group.commands[command]
    usage_error: Any = typer.BadParameter.__base__  # typer has no public name for it
    try:
        code: int = parser.main(words or ["--help"] * (parser is group), program, standalone_mode=False)
    except usage_error as error:
        path = error.ctx.command_path if error.ctx else f"{program} {called}" if called in group.commands else program
        said = error.format_message().replace("Value error, ", "")  # of pydantic, with which typer parses
        fail(f"{said}{'' if said.endswith(('.', '?')) else '.'} See `{path} --help`")
        return WRONG_INPUT
    return code


if __name__ == "__main__":
    sys.exit(main())
