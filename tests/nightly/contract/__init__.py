"""Optimizer classes of other libraries."""
