"""What one call of attention brings, and the operations on it."""
