"""Differences between model families that matter to a cache."""
