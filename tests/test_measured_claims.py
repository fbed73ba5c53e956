"""Every measured claim of the README and the docs names the script that prints it, a date and a machine."""

from pathlib import Path

import pytest

from measured_claims import ROOT, claims

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXCEPTIONS = {
    ("docs/causes.md", "5%"): "advice: how long a warm-up should be",
    ("docs/run.md", "one in 31"): "a setting: how many steps are measured",
    ("docs/run.md", "2%"): "a setting: the budget of sampled steps",
    ("docs/zoo.md", "95%"): "the kind of interval",
}
"""Figures that are found and were not measured, each with the reason."""

SOURCE = "`python benchmarks/report.py`, two CPU cores, 2026-11-18:\n\n"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_measured_claim_has_its_script_date_and_machine(page):
    excused = {figure for name, figure in EXCEPTIONS if name == name_of(page)}
    lacking = [
        f"{claim.figure} ({', '.join(claim.lacks)}): {claim.sentence.strip()}"
        for claim in claims(page)
        if claim.lacks and claim.figure not in excused
    ]
    assert lacking == []


def test_every_exception_is_needed():
    lacking = {(name_of(page), claim.figure) for page in PAGES for claim in claims(page) if claim.lacks}
    assert set(EXCEPTIONS) - lacking == set()


def test_the_pages_of_results_have_claims():
    """What is not found is not checked."""
    counts = {name_of(page): len(claims(page)) for page in PAGES}
    assert counts["README.md"] >= 4
    assert counts["docs/performance.md"] >= 100
    assert counts["docs/detection.md"] >= 20
    assert counts["docs/zoo.md"] >= 20


@pytest.fixture
def page(tmp_path):
    def write(text):
        path = tmp_path / "page.md"
        path.write_text(f"# Page\n\nAn introduction.\n\n## Cost\n\n{text}\n")
        return path

    return write


@pytest.mark.parametrize(
    "claim",
    [
        "A guarded step takes 1.02 times as long.",
        "A guarded step takes less than 1% more time.",
        "The guard adds 0.3 ms to each step.",
        "It costs a few hundred microseconds.",
        "The page is 2.2 MiB.",
        "The first finding is right for 78 of 79 scripts.",
        "It was right in six of six runs.",
        "One step is skipped by mistake: 1 in 13,238.",
        "In 622,188 steps of healthy runs, no run was halted.",
        "All states were equal after 60 kills.",
        "It takes **1.63** times as long.",
        "| | bare | guarded |\n|---|---|---|\n| GPT | 25.63 | 1.011 |",
        "| fault | found |\n|---|---|\n| NaN | 30 of 30 |",
        "- The step is fast.\n- The step takes 5 ms.",
    ],
)
def test_a_claim_without_anything_is_found_and_one_with_everything_passes(page, claim):
    assert [found.lacks for found in claims(page(claim))][:1] == [("no script", "no date", "no machine")]
    sourced = claims(page(SOURCE + claim))
    assert sourced
    assert not any(found.lacks for found in sourced)


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        ("Two CPU cores, 2026-11-18: the page takes 2 MiB.", ("no script",)),
        ("`benchmarks/report.py`, two CPU cores: the page takes 2 MiB.", ("no date",)),
        ("`benchmarks/report.py`, 2026-11-18: the page takes 2 MiB.", ("no machine",)),
        (
            "`benchmarks/gone.py`, two CPU cores, 2026-11-18: the page takes 2 MiB.",
            ("benchmarks/gone.py does not exist",),
        ),
        (
            "The page takes 2 MiB.\n\n`benchmarks/report.py`, two CPU cores, 2026-11-18.",
            ("no script", "no date", "no machine"),
        ),
        (f"{SOURCE}\n## Speed\n\nThe page takes 2 MiB.", ("no script", "no date", "no machine")),
        ("The page takes 2 MiB ([cost](#cost)).", ("no script", "no date", "no machine")),
    ],
)
def test_what_is_missing_is_named(page, source, lacks):
    assert [claim.lacks for claim in claims(page(source))] == [lacks]


@pytest.mark.parametrize(
    "source",
    [
        "| | size |\n|---|---|\n| page | 2 MiB |\n\n`benchmarks/report.py`, H200, 2026-11-18.",
        "The page takes 2 MiB ([measured](#results)).\n\n## Results\n\n`benchmarks/report.py`, H200, 2026-11-18.",
        "`surefoot zoo score --half testing`, 16 CPU cores, 2026-11-18: 78 of 79.",
    ],
)
def test_a_source_after_a_table_or_behind_a_link_counts(page, source):
    found = claims(page(source))
    assert found
    assert not any(claim.lacks for claim in found)


@pytest.mark.parametrize(
    "text",
    [
        "`window_steps=64` takes the last 64 steps, and the run returns after 3 steps.",
        "The ranks are compared every 30 seconds, for at least 5 minutes.",
        "`--budget` (600 s) is wall-clock time.",
        "If a rank takes 1.25 times as long as the others, an event is logged.",
        "An outlier is more than 10 times above the median.",
        "0 x NaN is NaN.",
        "A learning rate that is 100 times too high.",
        "Of those at 0.9, nine of ten should be true.",
        "```\nstep 7: 3.2 ms, 99%\n```",
        "    step 7: 3.2 ms, 99%",
        "| table | limit |\n|---|---|\n| `layers` | 64 MiB |",
        "| cause | reported when |\n|---|---|\n| `progress.slow` | steps take 1.5 times as long |",
        "| fault | result |\n|---|---|\n| learning rate x 100 for 15 steps | returns |",
    ],
)
def test_settings_conditions_and_output_are_not_claims(page, text):
    assert claims(page(text)) == []
