"""Name the operation that made the first non-finite value of a step.

`find` runs the step and asks the questions, `recorder` sees every operation as it is dispatched, `flow` knows which
operation wrote a bad value into which memory, `origins` goes back from the loss and the gradients to where it began,
`trial` tells rival origins apart by repairing the others, `frames` and `names` say where that is in the user's words,
`describe` reads tensors, and `result` is what comes out.
"""
