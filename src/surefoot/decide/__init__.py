"""Verdict -> Decision: the response, its budget, and the agreement of all ranks."""
