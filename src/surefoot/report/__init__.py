"""Presentation: the report page, the live page, and the view in the terminal."""
