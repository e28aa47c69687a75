"""Geometry without ranks: every element has one place and one owner, and the norm depends on no cut."""
