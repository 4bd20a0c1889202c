"""`h2o.calibrate`: measure on texts which heads of a model need more of a cache."""
