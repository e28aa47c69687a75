"""Laws about the text of the library that neither the linter nor `lint-imports` checks."""
