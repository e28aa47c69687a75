"""The fixtures of `tests/commands`."""

from tests.commands.conftest import bare, no_launcher, one_rank, temporary, text, trained

__all__ = ["bare", "no_launcher", "one_rank", "temporary", "text", "trained"]
