"""Tests of `zero.state` for CI."""
