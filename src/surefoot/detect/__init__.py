"""Signals -> Verdict: decides whether a step, or a stretch of steps, is anomalous.

A detector is a frozen dataclass whose fields are its settings, with pure `init` and `update`. Two kinds share that
contract:

- `NonFinite`, `Explosion`, `Spike` use only tensor operations, so they judge a step on the device before it is
  applied, without a host sync.
- The others look back over a stretch of steps and use plain floats. They run on the host, a few steps later, and only
  raise alarms.
"""
