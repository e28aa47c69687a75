"""The programs: train, verify, sweep. They import the library; the library does not import them."""
