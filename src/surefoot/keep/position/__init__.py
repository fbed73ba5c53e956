"""The position in the data: a restarted script continues with exactly the next batch and the next random number."""
