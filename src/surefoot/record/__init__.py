"""What happened: the run log, the sinks beside it, and how it is read back."""
