"""Measurements of h2o and its peers side by side: `python -m benchmarks`, from a checkout."""
