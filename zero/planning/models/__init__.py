"""Descriptions of models, and the work of their units."""
