"""Further classes, processes, compilation, recipes and integrations."""
