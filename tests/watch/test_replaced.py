"""Functions are under `surefoot run` what they are under `python`, and what a script replaces is not called by us."""

import json
import re
from pathlib import Path

import pytest
from running import python, surefoot

DOCS = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
TABLE = DOCS.partition("<!-- functions -->\n")[2].partition("\n<!-- end of functions -->")[0]
NAMES = re.findall(r"^\| `([^`]+)`", TABLE, flags=re.MULTILINE)
SCRIPT = Path(__file__).with_name("known.py")
PARTS = {
    "devices": "what a default device, and a device context, apply to",
    "objects": "the attributes of torch's objects",
    "modes": "what function and dispatch modes of the script's see, and its losses under them",
    "transforms": "`vmap` and `torch.func`",
    "warned": "the file and line that a warning names",
    "replaced": "how often functions that the script replaced are called, and its losses",
    "subclassed": "how often methods of a tensor subclass are called, and its losses",
    "scripted": "TorchScript",
    "compiled": "graphs, graph breaks and recompilations",
    "swapped": "parameters that are swapped while the model is trained",
    "aliases": "every name under which torch holds a function that is written in C",
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """What the script tells, without and with `surefoot run`, and the table of that run."""
    folder = tmp_path_factory.mktemp("known")
    plain, watched = (run(folder, str(SCRIPT), *NAMES, fresh=True) for run in (python, surefoot))
    assert plain.returncode == watched.returncode == 0, plain.stderr + watched.stderr
    assert json.loads((folder / "run" / "facts.json").read_text())["problems"] == {}
    said = next((line for line in watched.stderr.splitlines() if line.startswith('{"table"')), "{}")
    return json.loads(plain.stdout), json.loads(watched.stdout), json.loads(said).get("table")


@pytest.mark.parametrize("name", NAMES)
def test_a_function_is_the_one_that_the_script_knows(known, name):
    plain, watched, _ = known
    assert watched["functions"][name] == plain["functions"][name]


@pytest.mark.parametrize("part", PARTS, ids=PARTS)
def test_a_script_sees_the_same(known, part):
    plain, watched, _ = known
    assert watched[part] == plain[part], PARTS[part]


def test_the_table_in_the_documentation_is_what_the_code_says(known):
    assert known[2] == TABLE, "put the output of `python -m surefoot.watch.patches.table` into docs/run.md"


def test_what_the_compiler_replaces_is_no_reason_to_observe_less_although_there_are_threads(watch):
    run = watch(
        """
        import threading
        import torch
        from torch import nn

        ended = threading.Event()
        threading.Thread(target=ended.wait, daemon=True).start()
        model = torch.compile(nn.Linear(4, 1), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
        ended.set()
        """
    )
    assert run.facts["steps"] == 30
    assert run.facts["problems"] == {}
