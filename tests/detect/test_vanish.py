import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from streams import NAN, judge
from surefoot import LayerStats, Signals


def layers(norms, ranks=None, nonfinite=None):
    names = tuple(f"layer{i}" for i in range(len(norms)))
    zeros = [0.0] * len(norms)
    return LayerStats(
        names,
        tuple(ranks or [2] * len(norms)),
        torch.tensor(norms, dtype=torch.float64),
        torch.tensor(norms, dtype=torch.float64),
        torch.tensor(nonfinite or zeros),
    )


def verdicts(stream, rule):
    return judge(rule, [Signals(i, nonfinite=0.0, layers=layers(norms)) for i, norms in enumerate(stream)])[1]


def found(stream, rule):
    return [bool(verdict.anomalous) for verdict in verdicts(stream, rule)]


RULE = sf.Vanishing(ratio=1e-6, steps=3)
DEEP = [1e-9, 1e-5, 1e-3, 1.0]
FINE = [0.1, 0.5, 0.7, 1.0]


def test_it_needs_its_steps_in_a_row():
    assert found([DEEP, DEEP, DEEP, DEEP], RULE) == [False, False, True, True]
    assert found([DEEP, DEEP, FINE, DEEP, DEEP, DEEP], RULE) == [False] * 5 + [True]


def test_the_alarm_names_both_ends_and_their_ratio():
    last = verdicts([DEEP] * 3, RULE)[-1]
    assert last.summary == "gradient of layer0 is 1e-09 of that of layer3, for 3 steps"
    assert last.evidence == {"first": "layer0", "last": "layer3", "first_norm": 1e-9, "last_norm": 1.0, "steps": 3}


@given(st.floats(1e-9, 1.0))
def test_the_ratio_counts_and_not_the_size(scale):
    assert not any(found([[norm * scale for norm in FINE]] * 5, RULE))
    assert found([[norm * scale for norm in DEEP]] * 3, RULE)[-1]


def test_a_layer_whose_gradient_is_exactly_0_is_another_matter():
    assert not any(found([[0.0, 0.2, 0.5, 1.0]] * 5, RULE))


def test_biases_and_gains_are_not_compared():
    rows = layers([1e-12, 0.1, 0.5, 1.0], ranks=[1, 2, 2, 2])
    assert not any(v.anomalous for v in judge(RULE, [Signals(i, layers=rows) for i in range(5)])[1])


@pytest.mark.parametrize("norms", [[1e-12], [1e-12, 1.0]])
def test_a_shallow_model_has_no_first_and_last(norms):
    assert not any(found([norms] * 5, RULE))


def test_a_broken_step_neither_counts_nor_resets():
    broken = Signals(2, nonfinite=3.0, layers=layers([NAN, 1e-5, 1e-3, 1.0], nonfinite=[3.0, 0.0, 0.0, 0.0]))
    deep = Signals(0, nonfinite=0.0, layers=layers(DEEP))
    assert [v.anomalous for v in judge(RULE, [deep, deep, broken, deep])[1]] == [False, False, False, True]


def test_without_per_layer_norms_there_is_no_verdict():
    state, verdict = RULE.update(2, Signals(0, loss=1.0))
    assert state == 2
    assert not verdict.anomalous
