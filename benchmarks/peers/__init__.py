"""What h2o is measured against: the same work in plain torch, and other packages."""
