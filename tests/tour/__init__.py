"""The names and the numbers of zero/TOUR.md are true, and its exercises can be solved."""
