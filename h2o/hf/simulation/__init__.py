"""A cache's answers from one forward pass over a whole text."""
