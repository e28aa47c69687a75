"""Planned bytes are those of the library; planned seconds obey their laws."""
