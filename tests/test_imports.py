"""Who may import whom, and what importing surefoot costs."""

import ast
import sys
from pathlib import Path

import pytest

import patience
import surefoot

ROOT = Path(surefoot.__file__).parent
STAGES = ("observe", "detect", "decide", "act", "keep", "build")
SHARED = ("types", "errors", "streams", "untouched", "folder_lock")
FILES = [path for stage in STAGES for path in sorted((ROOT / stage).rglob("*.py"))]


def imported(tree):
    """Every module of surefoot that some import names, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "surefoot")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "surefoot":
                yield from (f"surefoot.{name.name}" for name in node.names)
            elif node.module and node.module.startswith("surefoot."):
                yield node.module


def strangers(source, stage):
    """What a file of `stage` imports although it must not."""
    return [
        name for name in imported(ast.parse(source)) if name.split(".")[1:2] not in [[stage], *([s] for s in SHARED)]
    ]


def test_the_stages_are_where_they_are_looked_for():
    assert {path.parent.name for path in FILES} >= {"observe", "detect", "decide", "act"}
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_stage_imports_types_and_errors_and_itself(path):
    assert strangers(path.read_text(), path.relative_to(ROOT).parts[0]) == []


@pytest.mark.parametrize(
    "line",
    [
        "from surefoot.act.clip import ClipByNorm",
        "import surefoot",
        "import surefoot.state",
        "from surefoot import Spike",
        "from surefoot.stabilizer import TrainingStabilizer",
        "def f():\n    from surefoot.decide import escalation",
    ],
)
def test_an_import_of_another_stage_would_be_found(line):
    assert strangers(line, "detect")
    assert not strangers(
        "import torch\nfrom surefoot.types import Signals\nfrom surefoot.detect.spike import Spike", "detect"
    )


def modules_after(statement):
    """The top-level modules that are loaded in a fresh interpreter after a statement."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    found = patience.run([sys.executable, "-c", code], check=True)
    return set(found.stdout.split())


def test_importing_surefoot_loads_nothing_beyond_torch_and_numpy():
    loaded = modules_after("import surefoot")
    assert "surefoot" in loaded
    assert not loaded & {"pyarrow", "rich", "typer", "safetensors", "triton", "sklearn", "matplotlib", "pandas"}
    more = loaded - modules_after("import torch, numpy, torch.distributed") - {"surefoot"}
    assert {name for name in more if name not in sys.stdlib_module_names} == set()


def test_everything_that_is_exported_is_there_and_sorted():
    assert sorted(surefoot.__all__) == list(surefoot.__all__)
    assert [name for name in surefoot.__all__ if not hasattr(surefoot, name)] == []


def test_the_stub_for_type_checkers_names_what_the_package_exports():
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    declared = {
        name.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert declared == surefoot._MODULE_OF
    assert all(getattr(surefoot, name) is not None for name in surefoot.__all__)


def test_help_does_not_import_torch():
    code = "import sys; from typer.testing import CliRunner; from surefoot.cli import app; "
    code += "assert CliRunner().invoke(app, ['--help']).exit_code == 0; assert 'torch' not in sys.modules"
    patience.run([sys.executable, "-c", code], check=True)
