"""Incidents: everything that is needed to run one bad step again, in a folder that can be shared.

`retention` has the settings; `step_capture` records each step before it is judged, `random_streams` and
`loader_batches` make that cheap; `values` converts a batch to plain data and back; `fingerprints` compares two runs bit
for bit; `bundle` and `reading` write and read the folder; `environment` describes versions and hardware; `summary` is
the page for people.
"""
