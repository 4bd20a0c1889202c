"""What transformers runs for attn_implementation="h2o"."""
