"""Memory of offload."""
