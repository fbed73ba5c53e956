"""The pages of docs/start-right hold what they promise: code that runs, and pictures made by the code."""

import os
import re
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docs" / "start-right"
PAGES = sorted(FOLDER.glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), 1)
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path):
    """Run in an empty folder, so that what a block writes stays out of the repository."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("block", BLOCKS)
def test_every_code_block_runs_as_it_stands(block):
    exec(compile(block, "docs", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem)
def test_every_page_says_when_shows_the_use_a_picture_and_a_pitfall(page):
    text = page.read_text(encoding="utf-8")
    for part in ("**When.**", "**Use.**", "```python", "**Pitfall.**"):
        assert part in text
    (picture,) = re.findall(r"!\[.+\]\((.+\.svg)\)", text)
    assert (FOLDER / picture).read_text(encoding="utf-8").startswith("<svg")
    assert f"]({page.name})" in (FOLDER / "index.md").read_text(encoding="utf-8")


def test_every_picture_has_a_function_that_draws_it(script):
    pictures = script("benchmarks/start_right_pictures.py").PICTURES
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(pictures)


def test_a_picture_drawn_again_is_the_one_in_the_docs(script):
    """The schedules only: their numbers do not depend on a random draw, and so not on torch's version."""
    pictures = script("benchmarks/start_right_pictures.py")
    assert pictures.to_svg(pictures.schedules()) == (FOLDER / "schedules.svg").read_text(encoding="utf-8")
