"""The peers that h2o is compared with: the same work in plain torch, and other packages."""
