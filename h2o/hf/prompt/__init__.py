"""Decisions that need a whole prompt: scores of its keys by echo, and budgets of heads."""
