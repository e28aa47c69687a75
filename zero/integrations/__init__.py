"""`ZeroOptimizer` inside the loops of other libraries: import the module that has the library's name."""
