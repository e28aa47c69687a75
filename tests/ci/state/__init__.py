"""Older dicts, and edits of states."""
