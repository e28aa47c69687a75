"""A bucket on one rank: offload, staging, and streams in order."""
