"""`H2OCache`: made, forked, saved, loaded, taken over."""
