"""The commands train, verify and sweep. They import the library; it imports none of them but the function `verify`."""
