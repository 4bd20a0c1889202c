"""`H2OCache`: planning, creating, forking, saving, loading, and converting from a DynamicCache."""
