"""Tests of the whole library by what it promises, which a commit must not break."""
