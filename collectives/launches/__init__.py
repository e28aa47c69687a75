"""What ranks have launched on devices, without an awaited message for each collective; why a rank waits for long."""
