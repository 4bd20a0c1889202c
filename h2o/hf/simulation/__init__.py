"""What a cache would answer, in one forward pass."""
