"""The commands. They import the library. The library imports only `verify` from here."""
