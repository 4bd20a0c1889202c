"""Files, processes, progress and pictures: nothing here knows of caches or models."""
