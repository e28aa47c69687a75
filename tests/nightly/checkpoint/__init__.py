"""DeepSpeed's checkpoints, and 200 saves."""
