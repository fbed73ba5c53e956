"""Two real ranks under `surefoot run`: one that stops is named while it stands, one that leaves ends the other."""

from __future__ import annotations

import json

import pytest
from running import rank_of

import forked
import patience
from surefoot.diagnose.engine import diagnose_folder

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, kind = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{kind}", rank=rank, world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
numbers = torch.Generator().manual_seed(rank)

def next_batch():
    while kind == "waits" and not os.path.exists("go"):
        time.sleep(0.05)
    if kind == "leaves":
        sys.exit(0)

for step in range(12):
    if rank == 1 and step == 6:
        next_batch()
    x = torch.randn(8, 4, generator=numbers)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
WAITS, LEAVES = (1 + SCRIPT.splitlines().index(line) for line in ("        time.sleep(0.05)", "        sys.exit(0)"))


def start(folder, kind):
    (folder / "train.py").write_text(SCRIPT)
    command = ["-m", "surefoot", "run", "--out", kind, "train.py", kind]
    given = {"SUREFOOT_HANG_SECONDS": "2"}
    return [forked.start(command, cwd=folder, env=forked.environment(**rank_of(n, 2), **given)) for n in range(2)]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run whose second rank waits until it has been named, and then goes on."""
    folder = tmp_path_factory.mktemp("stopped")
    ranks = start(folder, "waits")
    patience.wait_until((folder / "waits" / "hang.json").exists)
    named = json.loads((folder / "waits" / "hang.json").read_text())
    during = diagnose_folder(folder / "waits")
    for rank in ranks:
        patience.wait_until(lambda rank=rank: "has made no progress" in rank.stderr)
    (folder / "go").touch()
    return folder / "waits", named, during, [rank.end(check=True) for rank in ranks]


def test_the_rank_that_stops_is_named_by_both_with_its_line_its_step_and_the_last_collective(stopped):
    _, named, during, ended = stopped
    assert (named["kind"], named["ranks"], named["step"]) == ("stands", [1], 6)
    assert named["where"] in (f"train.py:{WAITS}", f"train.py:{WAITS - 1}")
    assert named["waiting_where"].startswith("torch.autograd.backward at train.py:")
    assert all("surefoot: rank 1 has made no progress for" in each.stderr for each in ended)
    finding = during.serious[0]
    assert (finding.cause, finding.severity, finding.evidence["rank"]) == ("dist.hang", "error", 1)
    assert named["where"] in finding.where


def test_the_stacks_of_every_rank_are_in_its_folder(stopped):
    folder, *_ = stopped
    assert "loss.backward()" in (folder / "rank0" / "stacks.txt").read_text()
    assert "next_batch()" in (folder / "rank1" / "stacks.txt").read_text()


def test_a_rank_that_continued_is_a_remark_and_an_event(stopped):
    folder, _, _, ended = stopped
    assert all(each.returncode == 0 for each in ended)
    found = [each for each in diagnose_folder(folder).findings if each.cause == "dist.hang"]
    assert [each.severity for each in found] == ["info"]
    events = [json.loads(line) for line in (folder / "rank0" / "events.jsonl").read_text().splitlines()]
    assert "dist.hang" in [event["cause"] for event in events]


def test_a_rank_that_leaves_early_ends_the_other_with_one_clear_line(tmp_path):
    left, leaver = (rank.end() for rank in start(tmp_path, "leaves"))
    assert (left.returncode, leaver.returncode) == (1, 0)
    line = f"surefoot: this rank ends because rank 1 has ended after 6 steps (exit code 0 at train.py:{LEAVES})"
    assert line in left.stderr.splitlines()
    found = diagnose_folder(tmp_path / "leaves").serious[0]
    assert (found.cause, found.evidence["rank"], found.step) == ("dist.hang", 1, 6)
    assert f"train.py:{LEAVES}" in found.where
    assert "Connection closed" not in found.summary
