from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import INF, NAN, alarms, flags, judge, steps

RULE = sf.ClippingSaturated(window_steps=10, share=0.5)
factor = st.sampled_from([1.0, 1.0, 0.5, 0.01])


def clips(stream):
    return steps(clip_factor=stream)


@given(st.lists(st.one_of(factor, st.sampled_from([NAN, INF])), min_size=20, max_size=60))
def test_it_counts_the_clipped_steps_of_the_last_window(stream):
    window, expected = [], []
    for value in stream:
        window = [*window, value][-10:] if value <= 1.0 else window
        expected.append(len(window) == 10 and sum(value < 1.0 for value in window) > 5)
    state, verdicts = judge(RULE, clips(stream))
    assert [verdict.anomalous for verdict in verdicts] == expected
    assert state.clipped == sum(value < 1.0 for value in state.window)


def test_more_than_half_of_the_steps_clipped_is_reported_with_how_hard():
    verdict = judge(RULE, clips([1.0] * 4 + [0.25] * 6))[1][-1]
    assert verdict.anomalous
    assert verdict.evidence == {"clipped": 6, "steps": 10, "typical_factor": 0.25}
    assert verdict.summary == "6 of the last 10 steps were clipped, typically to 0.25 of their size"


def test_exactly_half_is_not_more_than_half():
    assert not any(flags(RULE, clips([1.0, 0.5] * 20)))


def test_it_is_a_remark_since_clipping_low_can_be_on_purpose():
    assert any(flags(RULE, clips([0.5] * 20)))
    assert not alarms(RULE, clips([0.5] * 20))


def test_it_ends_when_the_clipping_does():
    found = flags(RULE, clips([0.5] * 20 + [1.0] * 20))
    assert found[19]
    assert not any(found[25:])


def test_a_run_that_is_never_clipped_is_healthy():
    assert not any(flags(sf.ClippingSaturated(), clips([1.0] * 300)))
