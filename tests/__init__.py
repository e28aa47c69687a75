"""What a step launches on a device is within a budget."""
