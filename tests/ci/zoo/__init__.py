"""The zoo's table, its patterns and its judge."""
