"""A bucket on one rank: offload, staging, streams in order, and how a rank enters its group."""
