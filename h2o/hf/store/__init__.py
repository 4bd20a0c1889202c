"""What a layer holds, how it is read and reported, and what layers know together of a pass."""
