"""Meshes of six processes, and FSDP2 on the same mesh."""
