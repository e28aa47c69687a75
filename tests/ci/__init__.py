"""What every commit must keep beside the default tests: `python -m pytest tests/ci`."""
