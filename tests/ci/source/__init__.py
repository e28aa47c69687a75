"""Laws that need a look at torch, at imports or at the API page."""
