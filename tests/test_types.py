from dataclasses import replace

import numpy as np
import pytest
import torch

import surefoot as sf
from streams import NAN
from surefoot import Incident, LayerStats, Outcome, Signals, Verdict
from surefoot.errors import require
from surefoot.types import StepRecord, format_number, format_table


def layers(**more):
    return LayerStats(
        ("a.weight", "a.bias", "b.weight"),
        (2, 1, 2),
        torch.tensor([2.0, NAN, 0.0]),
        torch.tensor([1.0, 3.0, 0.0]),
        torch.tensor([0.0, 5.0, 0.0]),
        **more,
    )


# ---- LayerStats ------------------------------------------------------------------------------------------------------


def test_ratios_are_there_when_both_sides_were_measured():
    weights, moved = torch.tensor([4.0, 1.0, 8.0]), torch.tensor([1.0, 0.5, 2.0])
    assert layers().grad_to_param is None
    assert layers(param_norm=weights).update_to_weight is None
    assert layers(update_norm=moved).update_to_weight is None
    full = layers(param_norm=weights, update_norm=moved)
    assert full.grad_to_param[0] == 0.5
    assert full.update_to_weight.tolist() == [0.25, 0.5, 0.25]


def test_broken_layers_are_counted_by_name():
    assert layers().nonfinite_counts() == {"a.bias": 5}


def test_weights_are_of_rank_two_and_got_some_gradient():
    assert layers().weights() == [("a.weight", 2.0)]


def test_a_layer_without_gradient_is_known_by_its_largest_value_or_else_by_its_norm():
    assert layers().without_gradient.tolist() == [False, False, True]
    unmeasured = replace(layers(), grad_largest=None)
    assert unmeasured.without_gradient.tolist() == [False, False, True]
    assert unmeasured.weights() == [("a.weight", 2.0)]
    assert "grad_largest" not in next(unmeasured.rows())


def test_rows_hold_what_was_measured_and_nothing_else():
    assert list(next(layers().rows())) == ["name", "grad_norm", "grad_largest", "nonfinite"]
    row = next(layers(param_norm=torch.tensor([4.0, 1.0, 8.0])).rows())
    assert row == {
        "name": "a.weight",
        "grad_norm": 2.0,
        "grad_largest": 1.0,
        "nonfinite": 0.0,
        "param_norm": 4.0,
        "grad_to_param": 0.5,
    }


def test_layers_print_as_a_table():
    lines = str(layers()).splitlines()
    assert lines[0].split() == ["name", "grad_norm", "grad_largest", "nonfinite"]
    assert lines[2].split() == ["a.bias", "nan", "3", "5"]


# ---- Signals ---------------------------------------------------------------------------------------------------------


def test_a_signal_is_found_by_name_ours_or_the_users():
    signals = Signals(7, loss=1.5, extra={"kl": 0.25})
    assert (signals.get("loss"), signals.get("kl"), signals.get("step")) == (1.5, 0.25, 7)


@pytest.mark.parametrize("name", ["grad_norm", "no_such_signal", "layers", "extra", "get", "device"])
def test_what_is_no_number_is_no_signal(name):
    assert Signals(0, layers=layers()).get(name) is None


@pytest.mark.parametrize("kind", [int, float, np.float32, np.float64, np.int64, torch.tensor])
def test_every_kind_of_number_is_a_signal(kind):
    assert Signals(0, loss=kind(2)).get("loss") == 2


def test_signals_know_where_they_lie():
    assert Signals(0, loss=1.0).device is None
    assert Signals(0, loss=1.0, grad_norm=torch.tensor(1.0)).device == torch.device("cpu")
    assert Signals(0, extra={"kl": torch.empty((), device="meta")}).device == torch.device("meta")


# ---- Verdict, Incident, Outcome --------------------------------------------------------------------------------------


def test_a_single_verdict_is_its_own_leaf():
    verdict = Verdict("spike", True)
    assert list(verdict.leaves()) == [verdict]


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("none", "left alone"),
        ("skip", "step skipped"),
        ("back_off", "step skipped, learning rate cut"),
        ("halt", "halted"),
    ],
)
def test_an_incident_says_when_what_and_what_was_done(action, told):
    incident = Incident(12, "spike", "warning", "loss is 9", action)
    assert str(incident) == f"step 12: spike: loss is 9 ({told})"


def outcome(**record):
    record = StepRecord(Signals(3, loss=1.25, grad_norm=0.5, **record.pop("signals", {})), **record)
    return Outcome(3, lambda: record)


def test_an_outcome_tells_what_became_of_the_step():
    applied = outcome(skipped=False, signals={"clip_factor": 0.5, "layers": layers()})
    assert (applied.applied, applied.skipped, applied.clipped, applied.accumulating) == (True, False, True, False)
    assert (applied.loss, applied.grad_norm, applied.layers.names[0]) == (1.25, 0.5, "a.weight")
    assert repr(applied) == "Outcome(step=3, applied, loss=1.25, grad_norm=0.5)"


def test_a_skipped_outcome_names_its_reasons():
    skipped = outcome(skipped=True, reasons=("nonfinite", "spike"))
    assert (skipped.applied, skipped.skipped, skipped.clipped) == (False, True, False)
    assert skipped.reasons == ("nonfinite", "spike")
    assert repr(skipped) == "Outcome(step=3, skipped: nonfinite, spike, loss=1.25, grad_norm=0.5)"
    assert "skipped: overflow" in repr(outcome(skipped=True, overflow=True))


def test_an_outcome_that_is_still_accumulating_has_no_numbers():
    waiting = Outcome(3, None)
    assert (waiting.accumulating, waiting.applied, waiting.skipped, waiting.clipped) == (True, False, False, False)
    assert waiting.reasons == ()
    assert repr(waiting) == "Outcome(step=3, accumulating)"
    with pytest.raises(sf.UsageError, match="step 3 is still accumulating"):
        _ = waiting.loss


def test_reading_an_outcome_is_what_reads_and_making_it_does_not():
    read = []
    made = Outcome(0, lambda: read.append(1) or StepRecord(Signals(0, loss=1.0), False))
    assert read == []
    assert made.loss == 1.0
    assert read == [1]


# ---- the small helpers -----------------------------------------------------------------------------------------------


def test_numbers_are_short_and_words_are_left():
    assert [format_number(value) for value in (1.23456789, 1e-9, NAN, 7, "8x5", None)] == [
        "1.235",
        "1e-09",
        "nan",
        "7",
        "8x5",
        "None",
    ]


def test_a_table_aligns_its_columns():
    assert (
        format_table([{"name": "a", "n": 1}, {"name": "longer", "n": 100}]) == "name      n\na         1\nlonger  100"
    )
    assert format_table([]) == "(nothing)"


def test_every_error_is_one_of_ours_and_one_of_pythons():
    for error, python in (
        (sf.SettingError, ValueError),
        (sf.UsageError, RuntimeError),
        (sf.TrainingHalted, RuntimeError),
    ):
        assert issubclass(error, sf.SurefootError)
        assert issubclass(error, python)
    with pytest.raises(sf.SettingError, match=r"^wrong$"):
        require(False, "wrong")
    require(True, "right")
