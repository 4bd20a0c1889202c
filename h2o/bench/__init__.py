"""Side-by-side measurements of h2o and its peers: `h2o bench`."""
