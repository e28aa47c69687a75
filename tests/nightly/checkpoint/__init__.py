"""DeepSpeed's checkpoints, 200 saves, file systems."""
