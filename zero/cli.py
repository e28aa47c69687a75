"""The `zero` command.

Knows: the commands and how typer presents them; their flags are the fields of each command's configuration. Does
not know: what the commands do. Without the `cli` extra it says what to install.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated, Any

from . import verification
from .config import TrainConfig, typer_signature
from .view import INSTALL_HINT

__all__ = ["main"]

NEEDED = ("typer", "rich")


def main() -> None:
    """Entry point of the console script."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needed = f"error: the zero command needs {' and '.join(missing)}: {INSTALL_HINT}"
        print(f"{needed} (or use `python -m zero.train`, `python -m zero.verify`)", file=sys.stderr)
        sys.exit(1)
    _application()()


def _application() -> Any:
    import typer

    application = typer.Typer(
        name="zero", help="Train with ZeroOptimizer, and prove it.", no_args_is_help=True, add_completion=False
    )
    application.callback()(_root)
    application.command("train", help="Train a byte-level GPT on real text, on any number of ranks.")(_train_command())
    application.command("verify", help=verification.HELP)(_verify_command())
    return application


def _root() -> None:
    """ZeRO stages 0 to 3 with the bits of the plain loop."""


def _train_command() -> Any:
    """A function with one keyword argument per field of TrainConfig, which typer turns into flags."""
    import typer

    def train(**flags: Any) -> None:
        from .train import run

        try:
            config = TrainConfig(**flags)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        raise typer.Exit(run(config))

    signature = typer_signature(typer.Option)
    train.__signature__ = signature  # type: ignore[attr-defined]
    train.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return train


def _verify_command() -> Any:
    import typer

    def verify(function: Any) -> None:
        raise typer.Exit(verification.run(function))

    argument = typer.Argument(metavar=verification.FUNCTION, help=verification.FUNCTION_HELP)
    verify.__annotations__ = {"function": Annotated[str, argument], "return": None}
    return verify


if __name__ == "__main__":
    main()
