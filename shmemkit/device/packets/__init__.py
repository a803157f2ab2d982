"""Data and flag in one: units in a peer's memory that show by themselves that they have arrived."""
