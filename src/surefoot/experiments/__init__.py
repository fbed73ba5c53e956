"""Controlled experiments: run a script again with one change at a time and report which change cures it.

`plan` lists the changes and decides which of them can apply. `scratch_folder` makes the folder that a run works in,
`processes` runs them in parallel, and `trials` schedules them within the budget. `baseline` runs the unchanged script.
`run_comparison` judges the outcome of each run. `change_causes` maps changes to the causes that they fix.
`bisect` combines these; `results` presents the result. `incident` does the same for one captured step:
`after_incident` judges its short runs and `step_conclusion` combines them. The changes themselves are applied inside
the runs by `surefoot.experiments.changes`, and for the data of a captured step by `surefoot.replay.continued_run`.
Except for `incident`, nothing here imports torch.
"""
