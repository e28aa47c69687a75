"""`zero plan` beside published runs of other systems.

`points.csv` has the runs, each with its source. `setting` reads a row, `memory` and `systems` have the memory and the
schedule of the system that it names, `rows` plans it, `scores` compares, `fit` fits the planner's constants.
"""
