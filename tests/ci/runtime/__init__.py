"""Memory of offload, and how ranks enter, leave and end with their process group."""
