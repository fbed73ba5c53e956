"""Refused steps are explained by what broke first."""

import torch

import surefoot as sf
from surefoot.guard.refusal import RefusalExplainer
from surefoot.types import LayerStats, StepRecord

NORMS_BEFORE = (1.0, 3.0, 2.0)


def explain(signals, *reasons, limits=None, weights_broken=False, is_stuck=False):
    checker = sf.StabilityChecker(**(limits or {}))
    explainer = RefusalExplainer(checker, lambda counts: list(counts)[-1], lambda: weights_broken)
    record = StepRecord(signals, skipped=True, reasons=reasons)
    return explainer.explain(record, NORMS_BEFORE, is_stuck=is_stuck, is_first=True)


def layers(**nonfinite):
    norms = torch.ones(len(nonfinite))
    return LayerStats(tuple(nonfinite), (2,) * len(nonfinite), norms, norms, torch.tensor(list(nonfinite.values())))


def test_the_parameter_whose_gradient_was_ready_first_is_named_with_its_count():
    signals = sf.Signals(3, 0.5, float("nan"), 7, layers=layers(head=2, body=5))
    summary, evidence = explain(signals, "nonfinite")
    assert summary == "5 non-finite values in the gradient of body and 1 more; the loss is 0.5"
    assert evidence["nonfinite"] == {"head": 2, "body": 5}
    summary, evidence = explain(signals, "nonfinite", weights_broken=True)
    assert summary.startswith("the weights are not finite")
    assert evidence["weights_broken"] is True


def test_a_finite_loss_here_means_that_another_rank_has_the_other_one():
    assert explain(sf.Signals(3, 0.5, 1.0, 0), "nonfinite")[0].startswith("another rank's loss or gradient")


def test_an_overflow_at_the_lowest_scale_names_the_scale():
    summary, evidence = explain(sf.Signals(3, 0.5, 1.0, 3, loss_scale=1.0), is_stuck=True)
    assert "overflow at loss scale 1" in summary
    assert evidence["loss_scale"] == 1.0


def test_a_step_beyond_a_limit_is_measured_by_it_and_any_other_by_the_recent_median():
    signals = sf.Signals(3, 0.5, 200.0, 0)
    summary, evidence = explain(signals, "limit.grad_norm", limits={"max_grad_norm": 50.0})
    assert (summary, evidence.get("limit_grad_norm")) == ("gradient norm 200, above the limit of 50", 50.0)
    summary, evidence = explain(signals, "spike")
    assert summary == "gradient norm 200, 100 times its recent median; the loss is 0.5"
    assert evidence["typical_grad_norm"] == 2.0


def test_a_loss_that_nobody_gave_is_not_mentioned():
    broken = sf.Signals(3, None, float("nan"), 7, layers=layers(head=2))
    assert explain(broken, "nonfinite")[0] == "2 non-finite values in the gradient of head"
    assert explain(sf.Signals(3, None, 1.0, 0), "nonfinite")[0] == "another rank's loss or gradient is not finite"
    assert explain(sf.Signals(3, None, 200.0, 0), "explosion")[0] == "gradient norm 200, 100 times its recent median"
