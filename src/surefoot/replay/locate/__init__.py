"""Find the operation that made the first non-finite value of a step.

`find` runs the step, `recorder` records every operation as it is dispatched, `memory_writes` tracks which operation
wrote a bad value into which memory, `origins` goes back from the loss and the gradients to where it began and decides
between several origins by repairing the others, `frames` and `names` find the user's line and names, `describe`
summarizes tensors, and `result` is the result.
"""
