"""The stages combined: the guarded optimizer and `TrainingStabilizer`."""
