"""Initialisation: the named recipes, and `init_for`, which chooses among them by inspecting the model."""
