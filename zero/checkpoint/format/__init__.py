"""The format of a checkpoint: pure functions of names, shapes and bytes."""
