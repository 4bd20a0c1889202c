"""The attention that transformers runs for attn_implementation="h2o"."""
