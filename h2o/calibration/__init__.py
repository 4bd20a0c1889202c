"""`h2o.calibrate`: which heads of a model need more of a cache, measured on texts."""
