"""How a model rotates queries and keys by their positions."""
