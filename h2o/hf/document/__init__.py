"""A document that is read once and asked often."""
