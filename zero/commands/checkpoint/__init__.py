"""`zero checkpoint`: looks at checkpoints, and converts them from and to other formats."""
