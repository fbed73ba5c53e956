"""Persistence: checkpoints, snapshots, the position in the data, and resume."""
