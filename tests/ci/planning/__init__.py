"""The score of the planner."""
