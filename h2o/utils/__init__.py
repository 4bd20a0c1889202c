"""Helpers for files, processes, progress and pictures. None depends on caches or models."""
