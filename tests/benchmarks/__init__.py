"""Stored results, and the sums and checks of benchmarks."""
