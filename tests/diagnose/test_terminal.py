"""The diagnosis as text: the verdict, what matters, and nothing that a terminal would obey."""

from __future__ import annotations

from typing import get_args

from surefoot.diagnose.findings import Diagnosis, Finding, Outlook, Severity
from surefoot.diagnose.terminal import SHOWN, as_full_text, as_text, printable


def finding(cause: str, severity: Severity = "error") -> Finding:
    return Finding(
        cause, severity, 0.9, f"It is {cause}.", step=3, where=("train.py:7",), fixes=("Do this.", "Or that.")
    )


def test_the_first_findings_are_shown_and_the_rest_is_counted() -> None:
    many = tuple(finding(f"lr.{number}") for number in range(SHOWN + 2))
    text = as_text(Diagnosis("broken", 10, many), "runs/a")
    assert "surefoot: broken · 10 steps · runs/a" in text
    assert f"lr.{SHOWN - 1}" in text
    assert f"lr.{SHOWN} " not in text
    assert "and 2 more: surefoot diagnose runs/a" in text
    assert "Fix: Do this." in text
    assert "Or that." not in text


def test_verdict_and_severity_are_coloured_where_that_is_asked_for() -> None:
    held = Diagnosis("broken", 10, (finding("lr.too-high", "warning"),))
    for text in (as_text(held, "runs/a", colour=True), as_full_text(held, "runs/a", colour=True)):
        assert "\x1b[1;31mbroken\x1b[0m · 10 steps" in text
        assert "  \x1b[1;33mwarning\x1b[0m · \x1b[1mlr.too-high\x1b[0m · 0.90" in text
    assert "\x1b" not in as_text(held, "runs/a") + as_full_text(held, "runs/a")


def test_everything_is_shown_in_full() -> None:
    held = Finding(
        "lr.too-high",
        "error",
        0.9,
        "It is.",
        evidence={"update_to_weight": 0.123456789, "made_by": None},
        fixes=("A.", "B."),
    )
    text = as_full_text(Diagnosis("broken", 1, (held,)), "runs/a")
    assert "broken · 1 step · runs/a" in text
    assert "Evidence: update to weight 0.123457\n" in text  # and nothing of what is not known
    assert "Fix 2: B." in text


def test_remarks_are_notes_of_a_run_without_a_finding() -> None:
    assert "note: It is repro.unseeded." in as_text(Diagnosis("healthy", 5, (finding("repro.unseeded", "info"),)), "a")


def test_only_a_healthy_verdict_says_what_to_do_if_the_result_is_still_poor() -> None:
    ends = {verdict: as_text(Diagnosis(verdict, 5, ()), "a").splitlines()[-1] for verdict in get_args(Outlook)}
    hints = [verdict for verdict, end in ends.items() if "surefoot explain" in end]
    assert hints == ["healthy"]


def test_an_unknown_verdict_says_why() -> None:
    held = Diagnosis("unknown", 3, (), reason="Too short to judge.")
    long = as_text(Diagnosis("unknown", 3, (), reason="Too short to judge. " * 12), "a").splitlines()[2:]
    assert len(long) > 1
    assert all(line.startswith("  Too") or line[2] != " " for line in long)
    assert "Too short to judge." in as_text(held, "a")
    assert "Too short to judge." in as_full_text(held, "a")


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\x1b[31mb\nc") == "a\\x1b[31mb\nc"


def test_the_line_of_the_script_is_shown_below_its_place_and_fits_the_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    source = {"train.py:7": f"loss = {'x' * 300}\x1b", "other.py:1": "not a place of this finding"}
    held = Finding("lr.too-high", "error", 0.9, "It is.", 3, ("train.py:7", "layer"), {"source": source})
    for text in (as_text(Diagnosis("broken", 9, (held,)), "a"), as_full_text(Diagnosis("broken", 9, (held,)), "a")):
        at, line = text.splitlines()[-2:]
        assert at == "    At: step 3, train.py:7, layer"
        assert line.startswith("      7 | loss = xxx")
        assert len(line) == 80
        assert "\x1b" not in text
