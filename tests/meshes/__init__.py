"""Meshes of processes, and models that are spread over ranks by hand: bits, norms, checkpoints, errors by name."""
