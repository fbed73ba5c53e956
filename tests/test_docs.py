"""Every Python block of the README and the docs, and every example of a docstring, runs as it stands."""

from __future__ import annotations

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer.main

import surefoot
from surefoot import trainers
from surefoot.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "start-right")]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "src").rglob("*.py"))
    if ">>> " in path.read_text()
]
COMMANDS = typer.main.get_command(app).commands
WITHOUT_FIGURES = {"benchmarks/start_right_pictures.py", "benchmarks/torture_ranks.py", "benchmarks/torture.py"}
"""Scripts that demonstrate something, or draw it. Where figures of theirs are given, the section has a date too."""


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "<docs>", "exec"), {"__name__": "__docs__"})


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_of_docstrings_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    results = doctest.testmod(import_module(module))
    assert results.attempted
    assert not results.failed


def test_there_are_blocks_on_every_page_that_teaches():
    with_code = {param.id.rsplit("-", 1)[0] for param in BLOCKS}
    assert with_code >= {
        "README.md",
        "docs/guarded-step.md",
        "docs/clipping.md",
        "docs/precision.md",
        "docs/memory.md",
        "docs/recovery.md",
        "docs/detection.md",
        "docs/sinks.md",
    }


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_path_that_contributing_names_exists():
    named = {path for path in re.findall(r"`([\w./-]+/[\w.-]*)`", CONTRIBUTING) if "<" not in path}
    homes = [ROOT, ROOT / "src" / "surefoot"]
    assert len(named) > 20
    assert [path for path in sorted(named) if not any((home / path).exists() for home in homes)] == []


def test_every_table_that_contributing_names_exists():
    named = set(re.findall(r"`(_?[A-Z][A-Z_]{3,})`", CONTRIBUTING))
    code = [path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    tables = set(re.findall(r"^ *(_?[A-Z][A-Z_]{3,})\b.*? = ", "\n".join(code), re.MULTILINE))
    assert len(named) > 8
    assert named - tables == set()


@pytest.mark.parametrize(
    ("page", "modules"),
    [
        ("clipping.md", ("act.clip", "act.shape")),
        ("detection.md", ("detect.checker", "detect.combine", "detect.monitors", "detect.step_rules")),
        ("sinks.md", ("record.sinks",)),
    ],
)
def test_every_exported_part_is_on_the_page_of_its_kind(page, modules):
    parts = [name for name in surefoot.__all__ if module_of(name).startswith(modules)]
    named = set(re.findall(r"\w+", (ROOT / "docs" / page).read_text()))
    assert len(parts) >= 4
    missing = [name for name in parts if name not in named]
    assert not missing, f"describe {', '.join(missing)} in docs/{page}"


def test_every_exported_function_is_described():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {word for page in pages for word in re.findall(r"\w+", page.read_text())}
    functions = [name for name in surefoot.__all__ if inspect.isfunction(getattr(surefoot, name))]
    assert len(functions) >= 10
    assert [name for name in functions if name not in named] == []


def test_every_public_name_has_an_example_that_runs():
    pages = [*PAGES, *(ROOT / "docs" / "start-right").glob("*.md")]
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", "\n".join(p.read_text() for p in pages), re.M | re.S))
    shown = set(re.findall(r"\w+", code))
    homes = [(surefoot, surefoot.__all__), (surefoot.build, surefoot.build.__all__)]
    services = {"WandbSink", "MLflowSink"}  # need an account or a server
    missing = [
        name
        for home, names in homes
        for name in names
        if name not in shown | services and ">>>" not in (inspect.getdoc(getattr(home, name)) or "")
    ]
    assert not missing, f"add an example to docs/reference/: {', '.join(sorted(set(missing)))}"


@pytest.mark.parametrize(
    "page",
    [*PAGES, *sorted((ROOT / "docs" / "start-right").glob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_section_that_names_a_benchmark_says_when_it_ran(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for section in re.split(r"^(?=#)", text, flags=re.M):
        named = re.findall(r"benchmarks/\w+\.py", section)
        assert [path for path in named if not (ROOT / path).is_file()] == []
        if set(named) - WITHOUT_FIGURES:
            dated = re.search(r"20\d\d-\d\d-\d\d|performance\.md#", section)
            assert dated, f"{section.splitlines()[0]}: say when {named[0]} was run"


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: surefoot\.(\w+)$", pages, re.MULTILINE))
    assert "surefoot.build" in pages
    missing = sorted(set(surefoot.__all__) - set(surefoot.build.__all__) - listed)
    assert not missing, f"list each on its page in docs/reference/, as `::: surefoot.NAME`: {', '.join(missing)}"


@pytest.mark.parametrize("framework", trainers.FRAMEWORKS)
def test_every_trainer_has_a_page_that_is_listed_and_an_example(framework):
    page, example = f"docs/trainers/{framework}.md", f"examples/trainer_{framework}.py"
    assert (ROOT / page).is_file(), f"{page} is missing"
    assert (ROOT / example).is_file(), f"{example} is missing"
    assert f"trainers/{framework}.md" in (ROOT / "mkdocs.yml").read_text(), f"list {page} in mkdocs.yml"
    table = (ROOT / "docs" / "trainers" / "index.md").read_text()
    assert f"]({framework}.md" in table, f"add {page} to the first table of docs/trainers/index.md"
    assert f"`{example}`" in table, f"add {example} to the first table of docs/trainers/index.md"


def test_the_table_of_tested_faults_has_a_column_for_every_trainer():
    text = (ROOT / "docs" / "trainers" / "index.md").read_text()
    listed = re.findall(r"^\| (.*?) \| `pip install", text, re.M)
    columns = text.split("## What is tested")[1].split("\n| | ")[1].splitlines()[0]
    assert columns.strip(" |").split(" | ") == listed


def test_every_cell_of_the_table_of_tested_faults_has_a_test_that_exists():
    text = (ROOT / "docs" / "trainers" / "index.md").read_text()
    sections = [text.split(f"## {name}\n")[1].split("\n## ")[0] for name in ("What is tested", "The tests by row")]
    (table,), (names,) = (re.findall(r"^\|(?:---\|)+\n((?:\|.*\n)+)", each, re.M) for each in sections)
    faults, tests = ([row.strip("| ").split(" | ") for row in each.splitlines()] for each in (table, names))
    assert [name for name, _ in tests] == [row[0] for row in faults]
    for name, named in tests:
        columns = set()
        for test, files in re.findall(r"`(test_\w+)` in ((?:`\w+\.py`(?:, )?)+)", named):
            for file in re.findall(r"`(\w+\.py)`", files):
                source = (ROOT / "tests" / "trainers" / file).read_text()
                assert f"\ndef {test}(" in source, f"{name}: {file} has no {test}"
                columns.add("trl" if file == "test_examples.py" else file.removeprefix("test_").removesuffix(".py"))
        assert columns == {*trainers.FRAMEWORKS, "trl"}, name


def test_the_table_of_exit_codes_has_every_command():
    section = (ROOT / "docs" / "terminal.md").read_text().split("## Exit codes")[1].split("##")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)", row)}
    assert set(COMMANDS) - listed == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_of_surefoot_has_a_command_and_options_that_exist(page):
    text, fence = page.read_text(), re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
    lines = [*"".join(fence.findall(text)).splitlines(), *re.findall(r"`([^`\n]+)`", fence.sub("", text))]
    wrong = []
    for line in lines:
        match = re.match(r"(?:\$ |torchrun .*-m |python -m )?surefoot ([a-z]+)\b(.*)", line)
        if match is None:
            continue
        command, rest = COMMANDS.get(match[1]), match[2].split("#")[0]
        if isinstance(getattr(command, "commands", None), dict) and re.match(r" ([a-z]+)\b", rest):
            command = command.commands.get(rest.split()[0])
        # What follows the name of a script is passed to the script.
        own = re.split(r"\.py\b|\bSCRIPT\b|\bMODULE\b", rest)[0] if match[1] == "run" else rest
        options = {flag for each in getattr(command, "params", ()) for flag in each.opts} | {"--help", "-h"}
        if command is None or set(re.findall(r"(?<=[ \[])--?[a-z][\w-]*", own)) - options:
            wrong.append(line)
    assert wrong == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_headings_lead_somewhere(name):
    """`make docs` checks those between the pages of the documentation."""
    for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / name).read_text()):
        titles = re.findall(r"^#+ (.*)$", (ROOT / (target or name)).read_text(), re.M)
        assert heading in [re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles]


def module_of(name):
    return getattr(getattr(surefoot, name), "__module__", "").removeprefix("surefoot.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
