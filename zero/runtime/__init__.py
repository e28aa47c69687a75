"""A bucket on one rank: the memory of its weights, gradients and states, and what the rank does with it."""
