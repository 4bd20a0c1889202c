"""What the layers of a cache hold: slots, states, how they are copied, and reports on them."""
