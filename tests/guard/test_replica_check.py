"""Replicas that differ are an alarm while the run goes on: real processes over gloo."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import replica_scenarios as scenarios
import surefoot as sf
from rank_processes import Ranks, results
from surefoot.guard.replica_check import LISTED, NAMED_AFTER_STEPS, ReplicaCheck
from surefoot.observe.parameters import Layout

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.mark.parametrize(
    ("count", "odd", "kind", "named"),
    [(3, 0, "parameters", [0]), (3, 2, "moments", [2]), (2, 1, "parameters", [1])],
    ids=["the majority speaks against rank 0", "in the optimizer's state", "of two ranks, the higher one"],
)
def test_the_odd_rank_the_step_and_then_the_tensor_are_alarms_on_every_rank(tmp_path, count, odd, kind, named):
    assert Ranks().play(scenarios.spoil_one, tmp_path, count, odd=odd, at=6, kind=kind) == [0] * count
    for alarms in results(tmp_path, count):
        first, closer = alarms
        assert first["severity"] == closer["severity"] == "error"
        assert first["ranks"] == closer["ranks"] == named
        assert (first["last_equal_step"], first["first_step"]) == (5, 7)
        assert first["first_tensor"] is None
        assert closer["first_tensor"] == "2.weight"
    log = sf.load_run(tmp_path / "run" / "rank0")
    events = [event for event in log.events if event.cause == "dist.replicas-diverged"]
    assert [event.event for event in events] == ["alarm", "alarm"]
    assert f"rank {odd}" in events[0].summary


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_equal_replicas_raise_no_alarm_and_the_check_adds_no_collective(tmp_path, kind):
    assert Ranks().play(scenarios.healthy, tmp_path, kind=kind) == [0, 0]
    for outcome in results(tmp_path):
        bare, guarded = outcome["bare"], outcome["guarded"]
        assert guarded["parameters"] == bare["parameters"]
        assert "dist.replicas-diverged" not in guarded["alarms"]
        if kind == "ddp":
            assert guarded["collectives"] - bare["collectives"] == 20  # one per step, as without the check


def checks_of(count, odd=()):
    """The checks of so many ranks, as they are in one process each; those of `odd` hold another weight."""
    found = []
    for place in range(count):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        if place in odd:
            model.weight.data[0, 0] += 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        check = ReplicaCheck(Layout([model], optimizer), optimizer, SimpleNamespace(place=place, count=count))
        found.append((check, model, optimizer))
    return found


def reduce(ranks, step):
    """One all-reduce of all ranks: how many numbers it held, 0 for a step that carries none."""
    sent = [check.numbers(step) for check, _, _ in ranks]
    if all(each is None for each in sent):
        return 0
    total = torch.stack(sent).sum(0)
    for check, _, _ in ranks:
        check.take(step, total.clone())
    return total.numel()


@pytest.mark.parametrize("count", [LISTED + 1, 100])
def test_many_equal_ranks_send_64_numbers_however_many_they_are(count):
    ranks = checks_of(count)
    assert {reduce(ranks, step) for step in range(40)} == {0, 64}
    assert all(not check._found for check, _, _ in ranks)


def test_of_many_ranks_the_odd_one_is_named_some_steps_after_the_bits_differed():
    odd, at = 17, 21
    ranks = checks_of(30)
    sizes = {}
    for step in range(at + NAMED_AFTER_STEPS + 12):
        if step == at:
            ranks[odd][1].weight.data[0, 0] += 1
        sizes[step] = reduce(ranks, step)
    first = min(step for step, size in sizes.items() if size and step >= at)
    named = min(step for step, size in sizes.items() if size > 64)
    assert sizes[first] == 64
    assert named <= first + NAMED_AFTER_STEPS
    for check, _, _ in ranks:
        check._read(wait=True)
        divergence = check._found[0]
        assert (divergence.odd, divergence.reference, divergence.step) == ((odd,), 0, first)
        assert divergence.last_equal_step < at
