"""The demo: a character transformer learns from real text in three runs, and four faults are injected into two of them.

    clean     the plain loop without faults: the reference
    bare      the same loop with the faults, observed by `surefoot run`, which changes nothing
    guarded   the same faults, with a `TrainingStabilizer` in the loop

All three run the same script (`train.py`), each in its own process, with the same seed and the same order of the data.
`command` starts them (`runs`) and draws them while they run, `results` prints their outcome, and `cost` measures the
cost of a guarded step. All figures are from the runs just made.
"""
