"""The demo: a character transformer learns from real text three ways, side by side, and four things go wrong.

    clean     the plain loop, nothing goes wrong: what was to be had
    bare      the same loop with the faults, watched by `surefoot run`, which changes nothing
    guarded   the same faults, with a `TrainingStabilizer` in the loop

All three are one script (`train.py`) in a process of its own each, with the same seed and the same order of the data.
`runs` starts them, `show` draws them while they run and tells what came of them, `cost` measures what a guarded step
costs. Nothing is replayed or rigged: the figures are those of the runs just made.
"""
