"""How a model turns queries and keys by their positions."""
