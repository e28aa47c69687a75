"""Tests of the whole library by what README and LOOPS promise."""
