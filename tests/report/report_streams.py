"""Rows and events of every kind, for Hypothesis."""

from hypothesis import strategies as st

from surefoot.record.messages import Event, StepRow

numbers = st.none() | st.floats() | st.sampled_from([0.0, 1e-3, 2.5, 1e20, -1e300])
parts = st.sampled_from(["", "generator", "a name that is longer than any column", "色彩", "\x1b[2J"]) | st.text(
    max_size=4
)
steps = st.integers(0, 5000) | st.integers(0, 2**62)
times = st.floats(1e9, 2e9) | st.floats()
names = st.sampled_from(
    ["start", "resume", "skip", "overflow", "clip-burst", "spike", "rollback", "checkpoint", "lr-change", "alarm",
     "finding", "halt", "drops", "end"]
)  # fmt: skip
rows = st.builds(
    StepRow,
    step=steps,
    time=times,
    part=parts,
    loss=numbers,
    grad_norm=numbers,
    clip_factor=numbers,
    lr=numbers,
    loss_scale=numbers,
    skipped=st.booleans(),
)
events = st.builds(
    Event,
    event=names,
    step=st.none() | steps,
    summary=st.text(max_size=300),
    time=times,
    severity=st.sampled_from(["info", "warning", "error"]),
    part=parts,
    evidence=st.dictionaries(st.sampled_from(["total_steps", "dropped"]), st.integers(-5, 10**6) | st.text()),
)
