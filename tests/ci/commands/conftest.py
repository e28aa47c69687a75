"""The fixtures of `tests/commands`."""

from tests.commands.conftest import no_launcher, temporary

__all__ = ["no_launcher", "temporary"]
