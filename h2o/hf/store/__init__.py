"""The contents of a layer: slots, states, reports, and the guard that all layers share."""
