"""Decision -> Outcome: clip, scale, skip, accumulate; what really changes gradients and weights."""
