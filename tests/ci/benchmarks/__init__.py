"""Each benchmark in its smallest form; stored results, and the sums and checks of benchmarks."""
