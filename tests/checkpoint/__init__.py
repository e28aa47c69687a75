"""Tests of `zero.checkpoint`."""
