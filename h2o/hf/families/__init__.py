"""Differences between model families."""
