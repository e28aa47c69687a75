"""Tests of gradients which a commit must not break."""
