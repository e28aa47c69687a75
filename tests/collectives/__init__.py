"""Tests of `collectives`."""
