"""Export a failure as one short script that needs only torch.

`export` combines everything: find the first bad operation, run the step twice more to capture it, and write the
smallest part that still fails alone. `call_recorder` records the last calls with their inputs,
`program` turns some of those calls into lines of Python and runs them here, `call_text` writes one call, `choose`
decides on the calls and removes rows and columns, and `script` writes the files.
"""
