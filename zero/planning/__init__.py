"""What a training will hold, send and wait for, computed before it runs."""
