"""The command line `zero COMMAND`; also `python -m zero.train` and `python -m zero.verify`, each of one command.

Knows: how a command is found and run, and errors of the command line. Does not know: the commands (`application`).
Without the `cli` extra it prints what to install.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from .console import INSTALL_HINT
from .runner import WRONG_INPUT, fail

NEEDED = ("typer", "rich")


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

    from .application import OF_CHECKPOINT, RENAMED, application

    called = command or next((word for word in arguments if not word.startswith("-")), None)
    group: Any = typer.main.get_command(application(called))
    parser = group if command is None else group.commands[command]
    usage_error: Any = typer.BadParameter.__base__  # typer has no public name for it
    try:
        code: int = parser.main(arguments or ["--help"] * (parser is group), program, standalone_mode=False)
    except usage_error as error:
        alone = program if parser is not group or called not in group.commands else f"{program} {called}"
        path = alone if error.ctx is None else error.ctx.command_path
        remedy = f"See `{path} --help`"
        renamed = RENAMED.get(f"{called} {getattr(error, 'option_name', '')}")
        if renamed is not None:
            remedy = f"It is {renamed}"
        elif parser is group and called in OF_CHECKPOINT and called not in group.commands:
            remedy = f"It is `{path} checkpoint {called}`"
        said = error.format_message().replace("Value error, ", "")  # words of pydantic, with which typer parses
        fail(f"{said}{'' if said.endswith(('.', '?')) else '.'} {remedy}")
        return WRONG_INPUT
    return code


if __name__ == "__main__":
    sys.exit(main())
