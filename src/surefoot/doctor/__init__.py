"""The preflight: ten steps that predict, before a long run, what would go wrong in it."""
