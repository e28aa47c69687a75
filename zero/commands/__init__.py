"""The commands of `zero`. They import the library. The library imports only `verify` from here."""
