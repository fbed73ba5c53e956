"""Incidents: everything that is needed to run one bad step again, in a folder that a person can send to another.

`keeper` is the setting, `notes` what is remembered of a step while nobody knows yet that it is bad, `streams` and
`draws` how that costs next to nothing, `values` a batch as plain data and back, `prints` how two runs are compared bit
for bit, `bundle` and `reading` the folder, `surroundings` what it was made with, `summary` the page for people.
"""
