"""Explaining by experiment: run a script again under single changes and see which one cures it.

`plan` lists the changes and says which can apply, `scratch_folder` makes the folder a run works in, `processes` runs
them side by side, `trials` keeps the order and the time, `baseline` runs the script as it is, `run_comparison` and
`probes` read the outcome of each run, `change_causes` knows which change is a fix of which cause, `bisect` combines
them, `results` and `terminal` present the answer. `incident` asks the same of one captured step; `after_incident` reads
its short runs, `step_conclusion` says what they mean together. The changes themselves are made inside the runs:
`surefoot.experiments.changes`, and for the data of a captured step `surefoot.replay.continued_run`. Except for
`incident`, nothing here imports torch.
"""
