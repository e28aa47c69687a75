"""Holds parameters between steps, and makes them whole for a forward and a backward."""
