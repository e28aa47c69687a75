"""Where parameters are between steps, and what makes them whole for a forward and a backward."""
