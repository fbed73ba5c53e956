"""The preflight: ten steps that say, before a long run, what would go wrong in it."""
