"""Side-by-side measurements of h2o and its peers: `python -m benchmarks`, from a checkout."""
