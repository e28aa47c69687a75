"""Samplers under the workers of a `DataLoader`."""
