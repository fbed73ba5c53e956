"""Verdict -> Decision: what to do about it, how often, and whether all ranks agree."""
