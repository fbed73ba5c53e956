"""`surefoot run --guard`: a step whose gradients are not finite leaves no trace, and the run says what was skipped."""

import json
import math
from pathlib import Path

import pytest
import torch
from running import python, rank_of, surefoot

import forked
from surefoot.detect.step_rules import NonFinite
from surefoot.record.facts import GuardFacts
from surefoot.watch.context import WatchOptions
from surefoot.watch.guard import RULES, in_words
from surefoot.watch.watcher import Watcher

SCRIPT = Path(__file__).with_name("guarded_steps.py")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Every kind of optimizer with two bad steps each, under the guard."""
    folder = tmp_path_factory.mktemp("guarded")
    return folder, surefoot(folder, "--guard", str(SCRIPT), "cpu")


def test_only_values_that_are_not_finite_are_refused():
    assert (*RULES.step_rules, *RULES.look_back) == (NonFinite(),)
    assert RULES.setback is RULES.lost_progress is None


def test_a_bad_step_leaves_no_trace_in_any_optimizer(guarded):
    _, ended = guarded
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["failed"] == {}
    assert told["cases"] >= 78


def test_the_guard_says_what_it_skipped_and_why(guarded):
    folder, ended = guarded
    told = json.loads((folder / "run" / "run.json").read_text())["guarded"]
    cases = json.loads(ended.stdout.splitlines()[-1])["cases"]
    assert told["skipped"] == 2 * (cases - 5)  # four cases are the scaler's overflows, and one gradient was mended
    assert told["not_guarded"] == {}
    assert (told["first"], told["last"] > 0, len(told["parameters"])) == (0, True, 20)
    words = f"surefoot: --guard checked {told['checked']} steps and skipped {told['skipped']} (the first at step 0, "
    assert words in ended.stderr
    assert "not finite: the gradients of second.weight" in ended.stderr
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    skips = [event for event in events if event["event"] == "skip"]
    assert skips[0]["summary"] == "the step was skipped: the gradient of second.weight is not finite"
    found = json.loads((folder / "run" / "findings.json").read_text())
    assert found["verdict"] == "unstable"
    assert found["summary"].startswith(f"`--guard` skipped {told['skipped']} of {told['checked']} steps, the first")


@pytest.mark.parametrize(
    ("checked", "skipped", "first", "last", "other", "said"),
    [
        (50, 50, 0, 49, {}, "No step was applied: nothing was trained, and the weights are those from before"),
        (1, 1, 0, 0, {}, "No step was applied: nothing was trained"),
        (50, 44, 6, 49, {}, "No step was applied after step 5: nothing was trained since"),
        (50, 44, 5, 49, {}, None),  # one of them was applied
        (50, 1, 49, 49, {}, None),
        (50, 20, 6, 25, {}, None),
        (50, 50, 0, 49, {"SGD 1": "it is guarded by the script"}, None),
    ],
)
def test_a_guard_that_skips_every_step_says_that_nothing_was_trained(checked, skipped, first, last, other, said):
    facts = GuardFacts(
        checked=checked, skipped=skipped, first=first, last=last, parameters=["weight"], not_guarded=other
    )
    words = in_words(facts)
    assert words.startswith(f"--guard checked {checked} step")
    assert said in words if said else "was applied" not in words


def test_without_a_bad_step_the_guard_changes_no_bit(tmp_path):
    plain = python(tmp_path, str(SCRIPT), "cpu", "healthy")
    watched = surefoot(tmp_path, "--guard", str(SCRIPT), "cpu", "healthy")
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert json.loads(watched.stdout) == json.loads(plain.stdout)
    assert "steps and skipped none" in watched.stderr


THREADED = """
import threading, torch
torch.Tensor.__repr__ = lambda self, **settings: "T"
stop = threading.Event()
threading.Thread(target=stop.wait).start()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x = torch.randn(8, 4) * (float("nan") if step == 5 else 1.0)
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
stop.set()
print(all(bool(parameter.isfinite().all()) for parameter in model.parameters()))
"""


def test_a_script_that_replaces_methods_and_has_threads_is_guarded_too(tmp_path):
    (tmp_path / "script.py").write_text(THREADED)
    ended = surefoot(tmp_path, "--guard", "script.py")
    assert ended.stdout.split() == ["True"]
    assert "--guard checked 10 steps and skipped 1" in ended.stderr


RANKS = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

def train(model, optimizer):
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + rank + step)).square().mean()
        if step == 3 and rank == 0:
            loss = loss * float("nan")
        if step == 4 and rank == 1:
            loss = loss + float("inf")  # a loss of one rank's own, while the gradients of all are finite
        loss.backward()
        optimizer.step()
    held = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [p.flatten().tolist() for p in held]

replica, zero, sharded = DistributedDataParallel(net()), DistributedDataParallel(net()), net()
fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
ends = {
    "replica": train(replica, AdamW(replica.parameters())),
    "zero": train(zero, ZeroRedundancyOptimizer(zero.parameters(), AdamW)),
    "sharded": train(sharded, AdamW(sharded.parameters())),
}
print(json.dumps(ends))
dist.destroy_process_group()
"""


def test_ranks_leave_out_the_same_steps_and_what_is_sharded_is_not_guarded(tmp_path):
    (tmp_path / "train.py").write_text(RANKS)
    command = ["-m", "surefoot", "run", "--guard", "--out", "run", "train.py"]
    ranks = [forked.start(command, cwd=tmp_path, env=forked.environment(**rank_of(rank, 2))) for rank in range(2)]
    told = [rank.end(check=True) for rank in ranks]
    ends = [json.loads(each.stdout) for each in told]
    assert "NaN" not in json.dumps([ends[0]["replica"], ends[0]["zero"]])
    assert ends[0]["replica"] == ends[1]["replica"]
    assert ends[0]["zero"] == ends[1]["zero"]
    assert ends[0]["replica"] == ends[0]["zero"]
    for rank, each in enumerate(told):
        guarded = json.loads((tmp_path / "run" / f"rank{rank}" / "run.json").read_text())["guarded"]
        assert (guarded["skipped"], guarded["first"]) == (2, 3)
        assert len(guarded["not_guarded"]) == 1
        assert each.stderr.count("does not guard optimizer 4 (AdamW): its gradients may differ between ranks") == 1


def test_an_error_in_taking_in_the_numbers_is_reported_as_such_and_steps_are_guarded_and_logged_on():
    watcher = Watcher(WatchOptions(guard=True))
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    record = watcher.steps.optimizer_made(optimizer)
    watcher.events.add_skip = lambda *_: 1 / 0

    def step(scale=1.0):
        weight.grad = torch.full((3,), scale)
        watcher.steps.before(optimizer, False)
        optimizer.step()
        watcher.steps.after(optimizer)

    for scale in (1.0, math.nan, 1.0, math.nan):
        step(scale)
    assert list(watcher.probes.problems) == ["numbers of steps"]
    assert torch.allclose(weight, torch.full((3,), 0.8)), "both broken steps were skipped"
    assert not record.in_flight
    assert (record.series.count, record.series.waits) == (4, False)
    assert watcher.steps.guard.as_facts().not_guarded == {}
    watcher.sampler.end()


def test_options_behind_the_script_are_told_to_belong_to_it(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])")
    nothing = "\nsurefoot: the script did not import torch in this process, so there was nothing to observe\n"
    ended = surefoot(tmp_path, "train.py", "--guard", "--lr", "1", "--out=there", fresh=True)
    assert ended.stdout == "['--guard', '--lr', '1', '--out=there']\n"
    assert ended.stderr == (
        "surefoot: --guard, --out after train.py were passed to the script; to use them in surefoot, run: "
        "surefoot run --out DIR --guard train.py ...\n" + nothing
    )
    assert surefoot(tmp_path, "--guard", "train.py", "--lr", "1", "-m", "resnet50", fresh=True).stderr == nothing


def test_the_version_is_reported_without_torch(tmp_path):
    for code in ("--version", "-h"):
        told = python(tmp_path, "-X", "importtime", "-m", "surefoot", code, fresh=True)
        assert told.returncode == 0, told.stderr[-500:]
        assert told.stdout.startswith("surefoot 0." if code == "--version" else "Usage: surefoot")
        assert not any(line.split("|")[-1].strip() == "torch" for line in told.stderr.splitlines())


GUARDS_ITSELF = """
import torch
import surefoot as sf

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
guard = sf.attach(model, optimizer)
for step in range(30):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).pow(2).mean() * (float("nan") if step == 12 else 1.0)
    guard.observe(loss=loss)
    loss.backward()
    optimizer.step()
print(guard.counts["steps"], guard.counts["skipped"], bool(torch.isfinite(model.weight).all()))
"""


def test_an_optimizer_that_the_script_guards_itself_is_left_to_it_with_one_line(tmp_path):
    (tmp_path / "train.py").write_text(GUARDS_ITSELF)
    ended = surefoot(tmp_path, "--guard", "train.py")
    assert ended.stdout.splitlines()[-1:] == ["30 1 True"], ended.stderr
    line = "surefoot: --guard does not guard optimizer 1 (SGD): the script guards it with surefoot itself"
    assert ended.stderr.count(line) == 1
    assert "stopped watching" not in ended.stderr
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["steps"] == 30
