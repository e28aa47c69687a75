"""Optimizer classes of others, and the Trainer's arguments."""
