"""Jobs that lose and get ranks under torchrun."""
