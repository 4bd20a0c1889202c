"""`h2o stream`: text or chat without end through a cache of fixed size."""
