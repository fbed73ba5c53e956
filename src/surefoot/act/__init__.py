"""Decision -> Outcome: clip, scale, skip, accumulate; the parts that change gradients and weights."""
