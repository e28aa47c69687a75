"""Clips gradients, updates parameters, and keeps the optimizer's states."""
