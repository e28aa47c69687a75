"""Further sizes, versions and peers, which no commit waits for: `python -m pytest tests/nightly`."""
