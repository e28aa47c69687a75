"""Tests of `zero.planning`."""
