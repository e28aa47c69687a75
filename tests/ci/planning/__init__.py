"""The score of the planner, and its commands."""
