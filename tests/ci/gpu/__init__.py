"""NCCL among ranks that share one GPU; over gloo on the CPU."""
