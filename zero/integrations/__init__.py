"""Strategies, trainers and accelerators of other libraries that train with ZeroOptimizer."""
