"""Incidents: everything that is needed to run one bad step again, in a folder that can be shared.

`step_capture` records each step before it is judged, with the batches that `loader_batches` passes on; `values`
converts a batch to plain data and back; `contents` has the fingerprints that a replay is compared with; `bundle` has
the settings and writes the folder, `reading` reads it; `environment` describes versions and hardware; `summary` is the
page for people.
"""
