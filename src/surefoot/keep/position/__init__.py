"""The place in the data: a restarted script goes on with the very next batch and the very next random number."""
