"""Tests of `zero.state`."""
