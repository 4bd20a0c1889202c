"""What an `H2OCache` knows of its conversation, besides the keys in its layers."""
