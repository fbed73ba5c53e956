"""Signals -> Verdict: is this step, or this stretch, anomalous?

A detector is a frozen dataclass whose fields are its settings, with pure `init` and `update`. Two kinds share that
contract:

- `NonFinite`, `Explosion`, `Spike` use tensor operations alone, so they judge a step on the device before it is
  applied, without a host sync.
- The others look back over a stretch of steps and use plain floats. They run on the host, a few steps later, and only
  raise alarms.
"""
