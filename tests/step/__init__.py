"""The user's class steps shards to the plain bits, in every precision and partition, or is refused."""
