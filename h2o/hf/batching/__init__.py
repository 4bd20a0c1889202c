"""Many requests at a time."""
