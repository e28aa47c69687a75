"""Each benchmark in its smallest form."""
