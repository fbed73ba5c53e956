"""Shared utilities: state trees, random state, save and restore."""
