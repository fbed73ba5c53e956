"""Run the step of an incident again, and say whether it fails the same way.

`command` is the whole of it: two passes, each in a process of its own (`passes` starts them, `worker` is what runs
there), compared with the record and with each other (`verdict`), told to people (`show`). In a worker, `target` builds
the step out of what a function of the user's returns, `script` runs the user's script as far as its first step and puts
that step in place of the captured one (`stage`, with the `hooks` it needs), `state` loads what was captured, `values`
says how far gradients are apart, `origin` asks `diagnose/locate` for the first bad operation.

With `--experiments` the step is applied and the script goes on: `rehearsal` is what happens inside such a run, `rows`
finds the rows of the batch that fail, `loop` is the script where there is only a target. What is run, and what comes of
it, is `diagnose/experiments`.
"""
