"""The commands train, verify and sweep. They import the library. The library imports only `verify` from here."""
