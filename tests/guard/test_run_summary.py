"""The summary of a run, as text and in a notebook."""

from surefoot.guard.run_summary import RunSummary

LAYERS = [{"name": "0.weight", "grad_norm": 2.5, "update_ratio": None}]


def test_counts_are_in_the_singular_for_one():
    assert RunSummary({"steps": 1_200, "skipped": 0, "alarms": 1}) == "1,200 steps, 0 skipped, 1 alarm"


def test_incidents_and_layers_follow_the_counts():
    lines = RunSummary({"steps": 3}, ["step 2: nonfinite"], LAYERS).splitlines()
    assert lines[:3] == ["3 steps", "step 2: nonfinite", ""]
    assert "0.weight" in lines[-1]


def test_a_notebook_shows_the_same_and_escapes_it():
    html = RunSummary({"steps": 3}, ["step 2: <b> is NaN"], LAYERS)._repr_html_()
    assert "3 steps" in html
    assert "&lt;b&gt; is NaN" in html
    assert "0.weight" in html
    assert "none" in html, "a value that was not measured"
    assert "no incidents" in RunSummary({"steps": 3})._repr_html_()
