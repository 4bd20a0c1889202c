"""Decisions that need a whole prompt: the echo scores of its keys, and the budgets of heads."""
