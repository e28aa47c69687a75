"""Tests of `zero.commands`."""
