"""Explaining by experiment: run a script again under single changes and see which one cures it.

`plan` lists the changes and says which can apply, `shadow` makes the folder a run works in, `children` runs them side
by side, `trials` sees to the order and the time, `baseline` runs the script as it is, `judge` and `probes` read what
came of each run, `causes` knows which change is a fix of which cause, `bisect` joins them, `results` and `show` tell.
`incident` asks the same of one captured step; `stretch` reads its short runs, `meaning` says what they mean together.
The changes themselves are made inside the runs: `surefoot.experiments.changes`, and for the data of a captured step
`surefoot.replay.continued_run`. But for `incident`, nothing here imports torch.
"""
