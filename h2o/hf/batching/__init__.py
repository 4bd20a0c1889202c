"""Answering many requests at a time."""
