"""A captured step, rebuilt from a target, gives every loss and gradient bit for bit."""

import pytest
import torch

from captured import capture, incidents_in
from replayed import target
from surefoot.errors import UsageError
from surefoot.record.incidents.environment import hardware, switches, versions
from surefoot.record.incidents.reading import read_incident
from surefoot.replay.processes import ReplayPass
from surefoot.replay.target import TargetStep
from surefoot.replay.tensor_difference import differences
from surefoot.replay.verdict import judge

COMBINATIONS = [
    ("mlp", "fp32", 1),
    ("mlp", "bf16", 3),
    ("mlp", "fp16", 2),
    ("cnn", "fp32", 2),
    ("cnn", "bf16", 1),
    ("cnn", "fp16", 1),
    ("lstm", "fp32", 1),
    ("lstm", "fp32", 2),
    ("transformer", "fp32", 2),
    ("transformer", "bf16", 1),
    ("transformer", "fp16", 1),
]


def passed(step, incident):
    """What a worker would have answered."""
    step.run()
    apart = differences(incident.state.get("gradients", {}), step.gradients())
    return ReplayPass(step.prints(), apart, versions(), hardware(step.home), switches(), list(step.notes))


def replayed(folder, name):
    incident = read_incident(folder)
    torch.manual_seed(99)  # whatever the streams are before, it makes no difference
    first = passed(TargetStep(target(name), incident), incident)
    second = passed(TargetStep(target(name), incident), incident)
    return judge(incident.facts, first, second)


@pytest.mark.parametrize(("model", "precision", "accumulate"), COMBINATIONS)
def test_a_replay_is_bitwise(tmp_path, model, precision, accumulate):
    capture(tmp_path, model, precision, accumulate, step=4)
    (folder,) = incidents_in(tmp_path)
    found = replayed(folder, model)
    assert (found.kind, found.different) == ("reproduced", {})


def test_a_step_may_be_given_instead_of_its_parts(tmp_path):
    capture(tmp_path, "mlp", step=2)
    (folder,) = incidents_in(tmp_path)
    assert replayed(folder, "step_of_mlp").kind == "reproduced"


def flip_one_bit(stabilizer, net, optimizer, batch):
    """Once, at step 4: one bit of one value of one weight's gradient."""
    if stabilizer.steps != 4:
        return
    weight = net[0].weight

    def flipped(gradient):
        handle.remove()
        gradient = gradient.clone()
        gradient.view(torch.int32)[3, 5] ^= 1 << 26
        return gradient

    handle = weight.register_hook(flipped)


def test_one_flipped_bit_is_distinguished_from_a_deterministic_failure(tmp_path):
    capture(tmp_path, "mlp", step=4, each=flip_one_bit)
    (folder,) = incidents_in(tmp_path)
    found = replayed(folder, "mlp")
    assert (found.kind, found.cause, found.exit_code) == ("silent-corruption", "hw.silent-corruption", 3)
    assert list(found.different) == ["0.weight"]
    assert found.different["0.weight"]["first"] == [3, 5]
    assert (found.different["0.weight"]["values"], found.different["0.weight"]["bits"]) == (1, 1)
    assert "0.weight" in found.summary


def test_a_step_that_never_repeats_is_called_that(tmp_path):
    capture(tmp_path, "mlp", step=4)
    (folder,) = incidents_in(tmp_path)
    incident = read_incident(folder)
    step = TargetStep(target("mlp"), incident)
    first = passed(step, incident)
    step.models[0][0].weight.register_hook(lambda gradient: gradient + 1e-7)  # as an atomic add might
    found = judge(incident.facts, first, passed(step, incident))
    assert found.kind == "nondeterministic"
    assert list(found.different) == ["0.weight"]
    assert "use_deterministic_algorithms" in found.summary


def test_other_versions_and_threads_are_named_and_no_hardware_is_blamed(tmp_path):
    capture(tmp_path, "mlp", step=4, each=flip_one_bit)
    (folder,) = incidents_in(tmp_path)
    incident = read_incident(folder)
    step = TargetStep(target("mlp"), incident)
    incident.facts["versions"]["torch"] = "2.0.1"
    incident.facts["switches"]["threads"] = 96
    found = judge(incident.facts, passed(step, incident), passed(step, incident))
    assert found.kind == "inconclusive"
    assert f"torch is {torch.__version__}, was 2.0.1" in found.surroundings
    assert any(each.startswith("threads is") for each in found.surroundings)


def test_inputs_that_are_not_the_captured_ones_are_no_corruption(tmp_path):
    capture(tmp_path, "mlp", step=4)
    (folder,) = incidents_in(tmp_path)
    incident = read_incident(folder)
    step = TargetStep(target("mlp"), incident)
    incident.state["window"]["microbatches"][0]["drawn"][0]["items"][0]["value"].mul_(2)
    found = judge(incident.facts, passed(step, incident), passed(step, incident))
    assert found.kind == "inconclusive"
    assert "inputs differ from the recorded ones" in found.summary


def test_a_verdict_that_came_later_is_compared_and_called_inexact(tmp_path):
    capture(tmp_path, "mlp", step=2, steps=9, decide_on="device", lag_steps=3, fused=True)
    (folder,) = incidents_in(tmp_path)
    found = replayed(folder, "mlp")
    assert found.kind == "inconclusive"
    assert "3 more steps were applied" in found.summary


def test_another_model_is_refused_with_what_does_not_fit(tmp_path):
    capture(tmp_path, "mlp", step=2)
    (folder,) = incidents_in(tmp_path)
    with pytest.raises(UsageError, match="not the captured one"):
        TargetStep(target("cnn"), read_incident(folder))
