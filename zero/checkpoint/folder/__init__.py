"""The folder of checkpoints: its steps, its lock, and whether all ranks see it."""
