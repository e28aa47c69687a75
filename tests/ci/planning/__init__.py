"""Tests of `zero.planning` that a commit must not break: the accuracy of the score."""
