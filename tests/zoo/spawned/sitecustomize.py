"""Puts the bug of the environment into a Python process that a test starts: a fork of the zoo has this in its path."""

from tests.zoo.live import apply_what_is_carried

apply_what_is_carried()
