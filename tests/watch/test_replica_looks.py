"""Ranks that are watched leave what a comparison needs: scripts of two real processes over gloo, judged as one run."""

from __future__ import annotations

import json
import re
import socket
import textwrap
from functools import cache
from typing import TYPE_CHECKING

import pytest

import forked
from surefoot.diagnose.engine import diagnose_folder
from surefoot.guard.model_sampling import RANK_STEPS
from surefoot.record.facts import RankOptimizer, RankSetup, ReplicaLook
from surefoot.record.rank_file import read_rank
from surefoot.zoo import RANKS, find, specimens

if TYPE_CHECKING:
    from pathlib import Path

FAULTY = {
    "digits_inner_module": (0, "0.weight"),
    "forecast_accumulate": (0, "0.weight"),
    "digits_decayed_once": (1, "2.weight"),
    "sensor_restarted_scaler": (28, "0.weight"),
    "tones_rank_decay": (0, "0.weight"),
    "walks_one_seed": (0, "inputs"),
}
"""Scripts of the zoo; the step and the tensor that the finding names. The odd rank is always the second."""
ZOO_STEPS = 60
HEALTHY = ["accumulated_no_sync", "ensemble_members", "local_steps", "sharded_weights", "unused_branches"]

PRELUDE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
numbers = torch.Generator().manual_seed(rank)
"""
LOOP = """
for step in range(30):
    x = torch.randn(32, 8, generator=numbers)
    if spoil(step):
        x[3, 2] = float("nan")
    loss = (model(x) - x[:, :1]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run_ranks(folder, script, *arguments, count=2):
    """Run a script as several ranks under `surefoot run`; one that hangs is aborted and shows its stacks."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = ["-m", "surefoot", "run", "--out", "run", script, *arguments]
    imported = ("sklearn.datasets",) if "sklearn" in script.read_text() else ()
    environments = [forked.environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(count)]
    ranks = [forked.start(command, cwd=folder, env=each, imported=imported) for each in environments]
    ended = [rank.end(check=True) for rank in ranks]
    assert not any("stopped watching" in each.stderr for each in ended), ended
    return folder / "run"


@pytest.fixture(scope="module")
def zoo_run(tmp_path_factory):
    """The run folder of a script of the zoo, which takes fewer steps here."""

    @cache
    def run(name) -> Path:
        script = tmp_path_factory.mktemp(name) / f"{name}.py"
        text = find(name).path.read_text()
        script.write_text(re.sub(r"(?m)^for step in range\(\d+\)", f"for step in range({ZOO_STEPS})", text))
        return run_ranks(script.parent, script, "100")

    return run


@pytest.mark.parametrize("name", FAULTY)
def test_the_cause_is_named_with_the_odd_rank_the_first_step_and_the_first_tensor(zoo_run, name):
    diagnosis = diagnose_folder(zoo_run(name))
    first = diagnosis.findings[0]
    assert first.cause == find(name).truth, [(each.cause, each.summary) for each in diagnosis.findings]
    assert first.severity != "info"
    step, tensor = FAULTY[name]
    assert (first.evidence["rank"], first.step, first.evidence["first_tensor"]) == (1, step, tensor)
    assert "rank 1" in first.where


@pytest.mark.parametrize("name", HEALTHY)
def test_what_looks_alike_is_healthy(zoo_run, name):
    diagnosis = diagnose_folder(zoo_run(name))
    assert (diagnosis.verdict, diagnosis.serious) == ("healthy", ())


def test_every_cause_of_ranks_has_two_scripts_and_there_are_ten_healthy_ones():
    found = {}
    for each in specimens(RANKS):
        found[each.truth] = found.get(each.truth, 0) + 1
    assert found.pop("healthy") >= 10
    assert min(found.values()) >= 2
    assert len(found) == 6


def test_all_ranks_look_at_the_same_steps_and_describe_themselves_first(zoo_run):
    held = [list(read_rank(zoo_run("accumulated_no_sync") / f"rank{rank}")) for rank in range(2)]
    for rank, entries in enumerate(held):
        setup, optimizer, *looks = entries
        assert isinstance(setup, RankSetup)
        assert isinstance(optimizer, RankOptimizer)
        assert (setup.rank, setup.world_size, optimizer.parallel) == (rank, 2, "ddp")
        assert all(isinstance(look, ReplicaLook) for look in looks)
        assert [look.step for look in looks] == [step for step in range(ZOO_STEPS) if RANK_STEPS.due(step)]
        assert {look.backwards for look in looks} == {3 * (look.step + 1) for look in looks}


def test_shards_are_not_compared(zoo_run):
    entries = list(read_rank(zoo_run("sharded_weights") / "rank0"))
    (optimizer,) = [entry for entry in entries if isinstance(entry, RankOptimizer)]
    assert (optimizer.parallel, optimizer.names) == ("sharded", [])
    assert not any(isinstance(entry, ReplicaLook) for entry in entries)


def test_a_nan_of_one_rank_is_not_blamed_on_another(tmp_path):
    script = tmp_path / "train.py"
    spoil = "def spoil(step):\n    return rank == 1 and step == 20\n"
    script.write_text(textwrap.dedent(PRELUDE) + spoil + LOOP)
    diagnosis = diagnose_folder(run_ranks(tmp_path, script))
    assert diagnosis.findings[0].cause == "data.nonfinite-input"
    assert diagnosis.findings[0].evidence["rank"] == 1
    assert diagnosis.findings[0].step == 20
    assert [each.cause for each in diagnosis.serious] == ["data.nonfinite-input"]


CALM = "def spoil(step):\n    return False\n"


@pytest.mark.parametrize(
    "changed", ["nn.utils.clip_grad_norm_(model.parameters(), 0.01)", "model.module[0].weight.grad.mul_(3)"]
)
def test_a_rank_that_alone_changes_gradients_before_the_step_is_named(tmp_path, changed):
    script = tmp_path / "train.py"
    loop = LOOP.replace("    loss.backward()\n", f"    loss.backward()\n    if rank == 0:\n        {changed}\n")
    script.write_text(PRELUDE + CALM + loop)
    first = diagnose_folder(run_ranks(tmp_path, script)).findings[0]
    assert (first.cause, first.evidence["rank"], first.step) == ("dist.gradients-not-averaged", 0, 0)
    assert "changed on rank 0 only, between the backward and the step" in first.summary


def test_a_last_window_that_steps_under_no_sync_is_found_although_no_record_falls_on_it(tmp_path):
    assert not RANK_STEPS.due(8)
    script = tmp_path / "train.py"
    forward = "    loss = (model(x) - x[:, :1]).pow(2).mean()\n"
    quiet = f"    with model.no_sync() if step == 8 else torch.enable_grad():\n    {forward}"
    script.write_text(PRELUDE + CALM + LOOP.replace(forward, quiet))
    first = diagnose_folder(run_ranks(tmp_path, script)).findings[0]
    assert (first.cause, first.evidence["rank"], first.step) == ("dist.gradients-not-averaged", 1, 10)
    assert "1 step in between followed a forward under `no_sync()`" in first.summary


def test_a_model_that_all_ranks_clip_has_no_odd_rank(tmp_path):
    script = tmp_path / "train.py"
    clip = "    loss.backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
    script.write_text(PRELUDE + CALM + LOOP.replace("    loss.backward()\n", clip))
    run = run_ranks(tmp_path, script)
    assert diagnose_folder(run).serious == ()
    looks = [entry for entry in read_rank(run / "rank1") if isinstance(entry, ReplicaLook)]
    assert {look.gradients_changed for look in looks} == {True}


def test_ranks_with_different_numbers_of_batches_inside_of_join_are_healthy(tmp_path):
    script = tmp_path / "train.py"
    epochs = LOOP.replace("range(30)", "range(20 - 5 * rank)")
    body, end = textwrap.indent(epochs, " " * 8).rsplit("        dist.destroy", 1)
    script.write_text(f"{PRELUDE}{CALM}for epoch in range(3):\n    with model.join():\n{body}dist.destroy{end}")
    run = run_ranks(tmp_path, script)
    assert diagnose_folder(run).findings == ()
    assert all(entry.uneven for entry in read_rank(run / "rank0") if isinstance(entry, ReplicaLook))


def test_steps_after_join_are_not_compared_because_ranks_count_them_differently(tmp_path):
    script = tmp_path / "train.py"
    first = LOOP.replace("range(30)", "range(20 - 5 * rank)").replace("dist.destroy_process_group()\n", "")
    joined = "with model.join():\n" + textwrap.indent(first, " " * 4)
    plain = "optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)\n"
    script.write_text(f"{PRELUDE}{plain}{CALM}{joined}{LOOP}")
    run = run_ranks(tmp_path, script)
    assert diagnose_folder(run).findings == ()


def test_a_run_of_one_process_writes_no_file_of_a_rank(watch):
    run = watch("import torch\nw = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(w.parameters(), lr=0.1)\n"
                "for _ in range(3):\n    w(torch.randn(4, 2)).sum().backward()\n    opt.step()\n")  # fmt: skip
    assert not (run.folder / "run" / "rank.jsonl").exists()
    assert json.loads((run.folder / "run" / "run.json").read_text())["world_size"] == 1
