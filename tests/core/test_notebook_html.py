"""HTML for notebooks: escaped, and without anything that is loaded."""

from surefoot.core.notebook_html import heading, page, table, text
from surefoot.doctor.checks import Examination, failed, passed
from surefoot.guard.run_summary import RunSummary

HOSTILE = '<script src="https://example.com">&'


def test_no_text_becomes_markup():
    made = page(heading(HOSTILE, HOSTILE), text(HOSTILE), table([HOSTILE], [[HOSTILE], ["fail"]]))
    assert "<script" not in made
    assert made.count("&lt;script src=&quot;https://example.com&quot;&gt;&amp;") == 5


def test_an_examination_lists_the_failed_check_first_and_escapes_it():
    checks = (passed(1, "forward", "runs"), failed(2, HOSTILE, HOSTILE, None, "", HOSTILE, "lr.too-high"))
    shown = Examination(checks, 0.1, (HOSTILE,))._repr_html_()
    assert "<script" not in shown
    assert shown.index("lr.too-high") < shown.index("forward")


def test_a_summary_is_text_and_its_html_has_the_incidents_before_the_layers():
    counts = {"steps": 2, "skipped": 1, "alarms": 1}
    summary = RunSummary(counts, [f"step 1: {HOSTILE}"], [{"name": HOSTILE, "grad_norm": 0.5, "update_norm": None}])
    assert summary.startswith(f"2 steps, 1 skipped, 1 alarm\nstep 1: {HOSTILE}\n\nname")
    shown = summary._repr_html_()
    assert "<script" not in shown
    assert shown.index("step 1:") < shown.index("grad_norm") < shown.index("0.5") < shown.index("none")
