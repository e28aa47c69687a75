"""Memory of offload, ranks that end, patterns of streams."""
