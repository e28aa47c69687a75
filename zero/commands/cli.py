"""The `zero` command.

Knows: the commands and how typer presents them; their flags are the fields of each command's configuration. Does
not know: what the commands do. Without the `cli` extra it says what to install, and which commands run without it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Annotated, Any

from .console import INSTALL_HINT
from .train.settings import SweepConfig, TrainConfig, typer_signature
from .verify import command as verification

__all__ = ["main"]

NEEDED = ("typer", "rich")


def main() -> None:
    """Entry point of the console script."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        needed = f"error: the zero command needs {' and '.join(missing)}: {INSTALL_HINT}"
        without = "train and verify run without: `python -m zero.train`, `python -m zero.verify`"
        print(f"{needed} ({without})", file=sys.stderr)
        sys.exit(1)
    _application()()


def _application() -> Any:
    import typer

    application = typer.Typer(
        name="zero", help="Train with ZeroOptimizer, and prove it.", no_args_is_help=True, add_completion=False
    )
    application.callback()(_root)
    train, sweep = _command(TrainConfig, _train), _command(SweepConfig, _sweep)
    application.command("train", help="Train a byte-level GPT on real text, on any number of ranks.")(train)
    application.command("sweep", help="Measure memory against time: every setting, and torch's own, side by side.")(
        sweep
    )
    application.command("verify", help=verification.HELP)(_verify_command())
    return application


def _root() -> None:
    """ZeRO stages 0 to 3 with the bits of the plain loop."""


def _command(config: type[TrainConfig] | type[SweepConfig], run: Callable[[Any], int]) -> Any:
    """A function with one keyword argument for each field of ``config``, which typer turns into flags."""
    import typer

    def command(**flags: Any) -> None:
        try:
            asked = config(**flags)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        raise typer.Exit(run(asked))

    signature = typer_signature(config, typer.Option)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return command


def _train(config: TrainConfig) -> int:
    from .train.command import run

    return run(config)


def _sweep(config: SweepConfig) -> int:
    from .sweep.command import run

    return run(config)


def _verify_command() -> Any:
    import typer

    def verify(function: Any) -> None:
        raise typer.Exit(verification.run(function))

    argument = typer.Argument(metavar=verification.FUNCTION, help=verification.FUNCTION_HELP)
    verify.__annotations__ = {"function": Annotated[str, argument], "return": None}
    return verify


if __name__ == "__main__":
    main()
