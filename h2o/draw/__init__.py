"""Text and axes to draw on: what notebooks and pictures of caches and of analyses share."""
