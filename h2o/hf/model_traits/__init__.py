"""Traits of models that matter to a cache: kinds of layers, latents, shared keys, wrappers."""
