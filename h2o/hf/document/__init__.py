"""Compression of a document that is read once and then asked many questions."""
