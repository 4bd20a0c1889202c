"""The state of a cache between forward passes: slots, pins, counts, states, and reports on it."""
