"""What carries bytes between ranks: threads, torch.distributed, memory that a host's processes share."""
