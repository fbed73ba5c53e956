"""An exported script fails as the step did, with torch alone, and is smaller than what it came from."""

import ast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surefoot
from exported import BY_NAME, export, run_alone
from surefoot.errors import SettingError, UsageError
from surefoot.replay.export.script import fails_alone

CHOSEN = {
    "log_of_zero": "torch.log made 1 -Inf",
    "fully_masked_softmax": "torch.softmax made 1 NaN",
    "fp16_overflow_in_a_matmul": "F.linear made 1 Inf",
    "layer_norm_of_a_constant_with_eps_zero": "F.layer_norm made 4 NaN",
    "mean_of_nothing": "torch.mean made 1 NaN",
    "embedding_row_with_inf": "F.embedding made 1 Inf",
    "sqrt_at_zero": "the backward of torch.sqrt made 1 Inf",
    "eigenvectors_of_equal_eigenvalues": "the backward of torch.linalg.eigh made 4 NaN",
    "custom_autograd_function": "aten.div.Tensor made 1 Inf",
    "recomputed_by_checkpointing": "the backward of torch.sqrt made 1 Inf",
    "loss_scale_too_large": "the backward of torch.mul made 1 Inf",
    "adam_without_epsilon": "Tensor.addcdiv_ made 1 NaN",
}


def too_much_in_sum():
    x = (torch.rand(500, 4) + 1).half() * 30  # no single value is too large: only the sum is
    return lambda: x.sum().float()


def under_autocast():
    net, x = nn.Linear(8, 4), torch.randn(6, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.sqrt(net(x) * 0).sum()

    return step


def edited(made, old, new):
    """The same script with one expression changed."""
    text = made.script.read_text()
    assert old in text
    made.script.write_text(text.replace(old, new))
    return made


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Every chosen fault and some more, exported here and run together in one fresh process."""
    made = {name: export(name, tmp_path_factory.mktemp(name)) for name in CHOSEN}
    for build in (too_much_in_sum, under_autocast):
        folder = tmp_path_factory.mktemp(build.__name__)
        made[build.__name__] = surefoot.export_reproduction(build(), folder, check=False)
    for name, root in {"cured": "torch.sqrt(value_2 + 1)", "other": "torch.sqrt(value_2) * float('nan')"}.items():
        made[name] = edited(export("sqrt_at_zero", tmp_path_factory.mktemp(name)), "torch.sqrt(value_2)", root)
    told = run_alone(*(each.script for each in made.values()))
    return {name: (each, *told[each.script]) for name, each in made.items()}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_script_fails_by_itself_and_is_smaller(exported, name):
    made, said, printed = exported[name]
    assert said.startswith(f"reproduced: {CHOSEN[name]} of "), said
    assert ", recorded were" not in said
    assert printed == ""
    assert made.tensor_bytes < made.came_from_bytes
    assert made.lines <= 45


@pytest.mark.parametrize("name", CHOSEN)
def test_the_script_needs_torch_alone_and_names_the_line(exported, name):
    text = exported[name][0].script.read_text()
    imports = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Import | ast.ImportFrom)]
    roots = {(each.module if isinstance(each, ast.ImportFrom) else each.names[0].name) for each in imports}
    assert roots <= {"json", "pathlib", "sys", "torch", "torch.nn"}
    if BY_NAME[name].line:
        assert f"nonfinite_faults.py:{BY_NAME[name].line}" in text
    readme = (exported[name][0].folder / "README.md").read_text()
    assert torch.__version__ in readme
    assert not [line for line in (text + readme).splitlines() if "/benchmarks/" in line]  # no absolute path


def test_a_folder_may_be_given_as_a_relative_path_and_the_check_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = export("exp_overflow", "here/made", check=True)
    assert made.folder == tmp_path / "here" / "made"
    assert made.script.exists()
    assert made.checked == "reproduced: torch.exp made 1 Inf of 1 values"


def test_the_check_runs_in_a_process_that_has_no_surefoot(tmp_path):
    made = export("exp_overflow", tmp_path / "made")
    made.script.write_text("import surefoot\n")
    fails, said = fails_alone(made.folder)
    assert not fails
    assert "must not need surefoot" in said


def test_a_cured_script_says_that_it_is_not_reproduced(exported):
    _, code, printed = exported["cured"]
    assert code == 0
    assert printed.startswith("not reproduced: every value is finite; recorded were 1 Inf")
    assert exported["other"][1].endswith("made 1 NaN of 1 values, recorded were 1 Inf")


def test_tensors_too_large_to_read_lie_beside_the_script(exported):
    made, said, _ = exported["too_much_in_sum"]
    assert 1000 < (made.folder / "tensors.safetensors").stat().st_size < 4000
    assert said == "reproduced: torch.sum made 1 Inf of 1 values"


def test_autocast_and_the_precision_are_kept(exported):
    made, said, _ = exported["under_autocast"]
    text = made.script.read_text()
    assert text.count('with torch.autocast("cpu", dtype=torch.bfloat16):') == 1
    assert "dtype=torch.bfloat16)" in text.split("with torch.autocast")[0]
    assert said.startswith("reproduced: the backward of torch.sqrt made 1 ")


def test_random_calls_give_way_to_their_results(tmp_path):
    net, x = nn.Linear(8, 4), torch.randn(6, 8)
    made = surefoot.export_reproduction(
        lambda: F.dropout(net(x), 0.5).abs().neg().sqrt().mean(), tmp_path, model=net, check=False
    )
    code = made.script.read_text().split("import torch")[1]
    assert "dropout" not in code
    assert "manual_seed" not in code
    assert ".abs()" in code


def test_a_function_that_does_a_lot_is_opened(tmp_path):
    net, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(4, 10, 64)
    padding = torch.zeros(4, 10, dtype=torch.bool)
    padding[2] = True
    made = surefoot.export_reproduction(
        lambda: net(x, x, x, key_padding_mask=padding)[0].mean(), tmp_path, model=net, check=False
    )
    assert made.title == "aten._softmax.default"
    assert (made.tensor_bytes, made.counts.nan) == (4, 1)


def test_only_the_rows_of_a_table_that_are_read_are_kept(tmp_path):
    table, tokens = nn.Embedding(5000, 32), torch.tensor([[4, 4999, 17]])
    with torch.no_grad():
        table.weight[4999, 3] = torch.nan
    made = surefoot.export_reproduction(lambda: table(tokens).mean(), tmp_path, model=table, check=False)
    assert made.tensor_bytes == 12
    assert "torch.tensor([[0]])" in made.script.read_text()


def test_the_step_is_left_as_it_was(tmp_path):
    net, x = nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = torch.optim.Adam(net.parameters(), eps=0.0)
    before = [parameter.clone() for parameter in net.parameters()]
    stream = torch.get_rng_state()

    def step():
        optimizer.zero_grad()
        (net(x + torch.rand(())) * 0).sum().backward()
        optimizer.step()

    assert surefoot.export_reproduction(step, tmp_path, model=net, check=False) is not None
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not optimizer.state
    assert torch.equal(stream, torch.get_rng_state())


def test_a_healthy_step_writes_nothing(tmp_path):
    assert surefoot.export_reproduction(lambda: torch.ones(3).log().sum(), tmp_path / "nothing") is None
    assert not (tmp_path / "nothing").exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="contains other files"):
        surefoot.export_reproduction(lambda: torch.zeros(3).log().sum(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_step_that_does_something_else_each_time_is_reported(tmp_path):
    ways = iter([torch.log, torch.reciprocal, torch.rsqrt, torch.log2, torch.lgamma, torch.digamma, torch.log10] * 3)
    with pytest.raises(UsageError, match="behaves differently when run again"):
        surefoot.export_reproduction(lambda: next(ways)(torch.zeros(3)).sum(), tmp_path)
    with pytest.raises(SettingError, match="must be a function"):
        surefoot.export_reproduction(torch.zeros(3), tmp_path)


def test_no_name_of_the_program_s_gets_out_of_its_comment(tmp_path):
    model = torch.nn.Module()
    ran = tmp_path / "ran"
    hostile = f"a\"'\r\nopen({str(ran).replace('.', '')!r}, 'w')\n\x0c\x00\u2028\u202e"
    model.register_parameter(hostile, torch.nn.Parameter(torch.full((2, 2), float("nan"))))
    weight = model.get_parameter(hostile)
    made = surefoot.export_reproduction(lambda: (torch.ones(1, 2) @ weight).sum(), tmp_path / "out", model=model)
    assert made.title == "torch.matmul"
    text = (tmp_path / "out" / "reproduce.py").read_text(encoding="utf-8")
    assert all(each.isprintable() for line in text.splitlines() for each in line)
    assert not ran.exists()
