"""Initialisation: the named recipes, and `init_for`, which picks among them by what it sees."""
