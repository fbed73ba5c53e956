"""Checkpoints: one folder each, complete or absent, safe to load; when to save, what to keep, what to load."""
