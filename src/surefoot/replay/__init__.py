"""Run the step of an incident again, and report whether it fails the same way.

`command` combines everything: two passes, each in its own process (`processes` starts them, `worker` runs there),
compared with the record and with each other and printed (`verdict`). In a worker, `target` builds the step
from what a function of the user returns; `script` runs the user's script up to its first step and replaces that step
with the captured one (`first_step`, with the `hooks` it needs). `state` loads what was captured, `tensor_difference`
measures how far gradients differ, and `locate` finds the first bad operation.

With `--experiments`, the step is applied and the script continues: `continued_run` is the code inside such a run,
`failing_rows` finds the rows of the batch that fail, `target_loop` is the script if there is only a target. The
experiments themselves are in `surefoot.experiments`.
"""
