"""Units that are gathered from the ranks that share a copy, and what a graph saves of them."""
