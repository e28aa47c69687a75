"""Jobs that lose and get ranks under torchrun, commands on real ranks, and `zero plan`."""
