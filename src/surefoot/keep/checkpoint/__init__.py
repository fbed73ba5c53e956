"""Checkpoints: one folder each, whole or not there, safe to load; when to save, what to keep, what to load."""
