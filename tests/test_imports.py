"""Who may import whom, and what importing surefoot costs."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import patience
import surefoot

ROOT = Path(surefoot.__file__).parent
CHECKOUT = Path(__file__).parents[1]
LAYERS = (
    ("types", "errors", "core"),
    ("observe", "detect", "decide", "act", "build"),
    ("keep", "record"),
    ("guard",),
    ("watch", "trainers"),
    ("diagnose",),
    ("doctor", "replay", "experiments"),
    ("report",),
    ("zoo", "demo"),
    ("commands", "cli", "__main__", "__init__"),
)
"""A package imports packages of its own row and of the rows above. The stages (row two) import row one alone."""
RANK = {package: rank for rank, row in enumerate(LAYERS) for package in row}
STAGES = LAYERS[1]
SCRIPTS = ("zoo/tuning/", "zoo/testing/", "zoo/demo/")
"""Training scripts as users write them: they import the public `surefoot`."""
FILES = [path for path in sorted(ROOT.rglob("*.py")) if not str(path.relative_to(ROOT)).startswith(SCRIPTS)]


def package_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree, *, types_only=False):
    """Every package of surefoot that some import names, wherever it stands, but for those of type checkers."""
    for node in ast.iter_child_nodes(tree):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"surefoot.{name.name}" for name in node.names] if node.module == "surefoot" else [node.module]
        else:
            names = []
        if not types_only:
            yield from ((name + ".__init__").split(".")[1] for name in names if name.split(".")[0] == "surefoot")
        yield from imported(node, types_only=types_only or guarded)


def against_the_layers(source, package):
    """The packages that a file of `package` imports although it must not."""
    return [
        other
        for other in imported(ast.parse(source))
        if other != package
        and (other not in RANK or RANK[other] > RANK[package] or (package in STAGES and other in STAGES))
    ]


def test_every_package_has_its_layer():
    assert {package_of(path) for path in FILES} <= set(RANK)
    assert len(FILES) > 300


def test_contributing_shows_these_layers():
    text = (CHECKOUT / "CONTRIBUTING.md").read_text()
    rows = [re.findall(r"`(\w+)`", packages) for packages in re.findall(r"^\| \d+ \|(.+?)\|", text, re.MULTILINE)]
    assert rows == [[name for name in row if not name.startswith("__")] for row in LAYERS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_no_layer_above_it(path):
    assert against_the_layers(path.read_text(), package_of(path)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from surefoot.act.clip import ClipByNorm",
        "import surefoot",
        "import surefoot.guard.stabilizer",
        "from surefoot import Spike",
        "from surefoot.guard.stabilizer import TrainingStabilizer",
        "def f():\n    from surefoot.decide import escalation",
        "if x:\n    from surefoot.keep import buffers",
    ],
)
def test_an_import_against_the_layers_would_be_found(line):
    assert against_the_layers(line, "detect")


def test_imports_along_the_layers_are_allowed():
    lines = "import torch\nfrom surefoot.types import Signals\nfrom surefoot.detect.step_rules import Spike\n"
    lines += "if TYPE_CHECKING:\n    from surefoot.guard.stabilizer import TrainingStabilizer"
    assert against_the_layers(lines, "detect") == []
    assert against_the_layers("from surefoot.keep.buffers import BufferKeeper", "guard") == []


@pytest.fixture(scope="module")
def first_import():
    """What a fresh interpreter tells about its first import of surefoot."""
    code = """
import json, sys
import torch, numpy, torch.distributed
before = sorted(sys.modules)
import surefoot as sf
after = sorted(sys.modules)
names = [sf.build.PreNormMLP.__name__, sf.presets.for_gan.__name__, sf.types.Detector.__name__]
is_callable = [callable(sf.diagnose)]
import surefoot.diagnose.engine
print(json.dumps([before, after, dir(sf), names, [*is_callable, callable(sf.diagnose)]]))
"""
    return json.loads(patience.run([sys.executable, "-c", code], check=True).stdout)


def test_importing_surefoot_loads_nothing_beyond_torch_and_numpy(first_import):
    before, loaded = ({name.split(".")[0] for name in modules} for modules in first_import[:2])
    assert not loaded & {"pyarrow", "rich", "typer", "safetensors", "triton", "sklearn", "matplotlib", "pandas"}
    assert {name for name in loaded - before if name not in sys.stdlib_module_names} == {"surefoot"}


def test_everything_that_is_exported_is_there_and_sorted():
    assert sorted(surefoot.__all__) == list(surefoot.__all__)
    assert [name for name in surefoot.__all__ if not hasattr(surefoot, name)] == []


def test_the_stub_for_type_checkers_names_what_the_package_exports():
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    declared = {
        name.asname or name.name: node.module if name.asname is None else f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert declared.pop("diagnose") == "surefoot.diagnose.engine.diagnose_folder"  # what calling the package calls
    loaded = surefoot._MODULE_OF | {
        "build": "surefoot.build",
        "trainers": "surefoot.trainers",
        "types": "surefoot.types",
        "presets": "surefoot.guard.presets",
    }
    only_loaded = sorted(loaded.items() - declared.items())
    only_declared = sorted(declared.items() - loaded.items())
    assert not only_loaded, f"import them in src/surefoot/__init__.pyi: {only_loaded}"
    assert not only_declared, f"add them to _NAMES_BY_MODULE in src/surefoot/__init__.py: {only_declared}"
    assert all(getattr(surefoot, name) is not None for name in surefoot.__all__)


def test_namespaces_are_reached_from_the_package_and_loaded_when_used(first_import):
    _, loaded, listed, names, is_callable = first_import
    assert "surefoot.types" not in loaded
    assert {"build", "diagnose", "presets", "types"} <= set(listed)
    assert names == ["PreNormMLP", "for_gan", "Detector"]
    assert is_callable == [True, True]


def test_help_does_not_import_torch():
    code = "import sys; from typer.testing import CliRunner; from surefoot.cli import app; "
    code += "assert CliRunner().invoke(app, ['--help']).exit_code == 0; assert 'torch' not in sys.modules"
    patience.run([sys.executable, "-c", code], check=True)


def test_every_optional_package_is_installed_for_development_in_a_pinned_version():
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (own,) = (re.findall(r"\w+", needed)[1:] for needed in extras["dev"] if needed.startswith("surefoot["))
    assert {*own, "dev"} == set(extras)
    assert set(surefoot.trainers.FRAMEWORKS) <= set(extras), "the message for a missing framework names an extra"
    pinned = re.findall(r"^([\w-]+)==", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE)
    needed = [re.match(r"[\w-]+", line)[0] for lines in (project["dependencies"], *extras.values()) for line in lines]
    assert set(needed) - {"surefoot"} == set(pinned)


def test_a_name_of_build_that_is_looked_for_in_surefoot_is_found() -> None:
    import torch  # noqa: F401 (without torch, the question must not import it)

    with pytest.raises(AttributeError, match=r"no attribute 'masked_softmax'; use `surefoot\.build\.masked_softmax`"):
        surefoot.masked_softmax  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        surefoot.nonsense  # noqa: B018
