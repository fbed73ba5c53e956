"""Incidents: everything that is needed to run one bad step again, in a folder that can be shared.

`step_capture` records each step before it is judged, `random_streams` and `loader_batches` make that cheap; `values`
converts a batch to plain data and back; `contents` has the fingerprints that a replay is compared with; `bundle` has
the settings and writes the folder, `reading` reads it; `environment` describes versions and hardware; `summary` is the
page for people.
"""
