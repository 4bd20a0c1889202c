"""The layers of an `H2OCache`."""
