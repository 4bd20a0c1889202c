"""`H2OCache`: how it is planned and made, forked, saved, loaded, and filled from a DynamicCache."""
