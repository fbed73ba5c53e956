"""Write a failure down as one short script that needs torch alone.

`export` combines everything: find the first bad operation, run the step twice more to get hold of it, and write what
still fails when it is alone. `call_recorder` remembers the last calls before it with what went in, `captured` holds
them, `program` makes lines of Python of some of those calls, `call_text` writes one call, `shrink` takes rows and
columns away, `trial` runs the lines here, `literals` writes tensors, `script` writes the files, and `check` runs the
script in a process that has no surefoot.
"""
