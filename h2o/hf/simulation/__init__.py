"""The outputs of a cache from one forward pass over a whole text."""
