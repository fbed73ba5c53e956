"""The run log, its sinks, and how it is read."""
