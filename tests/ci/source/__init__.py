"""Laws that need a look at torch, at imports, at every test or at the API page."""
