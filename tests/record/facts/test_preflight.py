"""What the doctor measured survives JSON, and stays out of the facts of a run."""

import math

from surefoot.record.facts import LabelControl, PreflightFacts, RateProbe, RunFacts


def probe(factor, end, gradually=False):
    return RateProbe(factor=factor, gradually=gradually, start=2.0, end=end, peak=3.0, steps=60, update_ratio=1e-3)


def test_what_was_measured_survives_json():
    facts = RunFacts(preflight=PreflightFacts(overfits=True, rates=[probe(1.0, math.nan)]))
    read = RunFacts.from_json(facts.to_json()).preflight
    assert read is not None
    assert (read.overfits, read.tiny_batch_left, read.rates[0].fall) == (True, None, -math.inf)


def test_a_run_has_none():
    assert "preflight" not in RunFacts().to_json()


def test_a_rate_is_found_by_its_factor_and_by_how_it_was_reached():
    facts = PreflightFacts(rates=[probe(0.1, 1.0), probe(1.0, 4.0), probe(1.0, 0.5, gradually=True)])
    assert facts.rate(1.0).fall == -1.0
    assert facts.rate(1.0, gradually=True).fall == 0.75
    assert facts.rate(10.0) is None


def test_the_gain_of_true_labels_is_a_share_of_the_loss():
    control = LabelControl(
        rows=256, steps=9, true_fall=0.6, shuffled_fall=0.6, true_held_out=1.0, shuffled_held_out=2.0
    )
    assert control.gain == 0.5
