"""The notebooks in `examples/` run from a clean start, and show results as HTML."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import notebooks

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWN_FIRST = {
    "check_a_setup": ["fail", "pass"],  # before and after the fix
    "guarded_run": ["warning", "not diagnosed"],  # the summary, and the loaded run, whose alarms follow
}


class Statuses(HTMLParser):
    """The statuses in the order of the page, and every element."""

    def __init__(self, html):
        super().__init__()
        self.bold, self.found, self.tags = False, [], set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.bold = tag == "span"

    def handle_data(self, data):
        if self.bold:
            self.found.append(data)
        self.bold = False


def test_every_notebook_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SHOWN_FIRST)


@pytest.mark.parametrize("name", SHOWN_FIRST)
def test_the_stored_outputs_tell_nothing_of_the_machine(name):
    assert not re.search(r"/(?:home|root|tmp|work|Users)\b", (EXAMPLES / f"{name}.ipynb").read_text())


@pytest.mark.parametrize("name", SHOWN_FIRST)
def test_the_notebook_runs_and_its_results_are_html_with_the_worst_first(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = notebooks.run(EXAMPLES / f"{name}.ipynb")
    pages = [page for cell in outputs for each in cell for page in each.get("data", {}).get("text/html", [])]
    assert [Statuses(page).found[0] for page in pages] == SHOWN_FIRST[name]
    for page in pages:
        assert Statuses(page).tags <= {"div", "p", "strong", "span", "table", "thead", "tbody", "tr", "th", "td"}
        assert not re.search(r"https?:|src=|url\(", page)
