"""Laws that need a look at torch, at imports or at every test: private names, marks, what is imported."""
