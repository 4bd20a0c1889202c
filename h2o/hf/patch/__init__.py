"""H2O for code that only calls the model."""
