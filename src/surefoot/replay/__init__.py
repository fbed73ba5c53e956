"""Run the step of an incident again, and say whether it fails the same way.

`command` combines everything: two passes, each in a process of its own (`processes` starts them, `worker` runs there),
compared with the record and with each other (`verdict`) and printed (`terminal`). In a worker, `target` builds the step
out of what a function of the user's returns; `script` runs the user's script as far as its first step and puts the
captured step in its place (`first_step`, with the `hooks` it needs). `state` loads what was captured,
`tensor_difference` measures how far gradients are apart, `origin` asks `locate` for the first bad operation.

With `--experiments` the step is applied and the script goes on: `continued_run` is what happens inside such a run,
`failing_rows` finds the rows of the batch that fail, `target_loop` is the script where there is only a target. What is
run, and what follows from it, is in `surefoot.experiments`.
"""
