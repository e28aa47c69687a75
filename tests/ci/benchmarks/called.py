"""A benchmark's command, called in this process."""

from __future__ import annotations

from typing import Any

import typer
from typer.testing import CliRunner, Result


def run(main: Any, *arguments: object) -> Result:
    """Call ``main``, the function of a typer command, with the arguments of a command line."""
    application = typer.Typer()
    application.command()(main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])
