"""A dead layer raises one alarm; what only has no gradient raises none."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from surefoot.guard.dead_layers import LOOKS, STEPS


def train(model, loss_of=None, steps=120, optimizer=None, **settings):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    stabilizer = sf.TrainingStabilizer(model, optimizer, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(16, 6, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() if loss_of is None else loss_of(model, x, step)
        stabilizer.backward(loss)
        stabilizer.step()
    return stabilizer


def alarms(stabilizer):
    return [incident for incident in stabilizer.incidents if incident.kind == "dead-layer"]


def net(activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 1))


def killed(model, place=2, parameter="bias"):
    nn.init.constant_(getattr(model[place], parameter), -100.0)
    return model


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


@pytest.mark.parametrize("place", [0, 2])
def test_a_layer_that_passes_nothing_on_is_named_once(place):
    model = killed(net(), place)
    stabilizer = train(model, steps=300)
    (alarm,) = alarms(stabilizer)
    assert (alarm.severity, alarm.action, alarm.evidence["layer"]) == ("warning", "none", str(place))
    assert alarm.evidence["behind"] == str(place + 2)
    assert STEPS <= alarm.step <= STEPS + LOOKS + 2
    assert stabilizer.counts["skipped"] == 0
    assert not any(module._forward_hooks for module in model.modules())


def test_it_is_seen_with_a_function_and_behind_a_norm():
    functional = Functional()
    nn.init.constant_(functional.first.bias, -100.0)
    assert [alarm.evidence["layer"] for alarm in alarms(train(functional))] == ["first"]
    normed = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    assert [alarm.evidence["layer"] for alarm in alarms(train(killed(normed, 1)))] == ["1"]
    after = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 1))
    assert [alarm.evidence["layer"] for alarm in alarms(train(killed(after, 0)))] == ["0"]


def test_it_is_seen_where_no_bias_follows():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))
    assert [alarm.evidence["layer"] for alarm in alarms(train(killed(plain, 0)))] == ["0"]
    image = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        *(nn.Conv2d(1, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(24, 1)),
    )
    assert alarms(train(image)) == []
    assert [alarm.evidence["layer"] for alarm in alarms(train(killed(image, 2)))] == ["2"]


class UnusedHeads(nn.Module):
    """Two heads that the loss of this phase does not use. The outputs of the first are all below 0."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.low, self.other, self.used = nn.Linear(8, 1), nn.Linear(8, 1, bias=False), nn.Linear(8, 1)
        nn.init.constant_(self.low.bias, -100.0)

    def forward(self, x):
        hidden = self.body(x)
        return self.used(hidden) + 0 * self.low(hidden) + 0 * self.other(hidden)


def test_heads_without_a_share_in_the_loss_are_not_dead_without_a_bias_either():
    assert alarms(train(UnusedHeads())) == []


def test_a_healthy_network_and_a_leaky_one_raise_nothing():
    assert alarms(train(net())) == []
    assert alarms(train(killed(net(nn.LeakyReLU)))) == []


class Gated(nn.Module):
    """The output of a branch is set to 0 by a mask, as where a modality is missing in this phase."""

    def __init__(self, gate):
        super().__init__()
        self.branch, self.mixer, self.head = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32 + 6, 1)
        self.gate = gate

    def forward(self, x):
        return self.head(torch.cat([self.mixer(self.gate * F.relu(self.branch(x))), x], 1))


def test_a_gate_a_mask_and_a_dropout_are_not_dead_layers():
    assert alarms(train(Gated(0.0))) == []
    assert alarms(train(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(1.0), nn.Linear(32, 1)))) == []


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        body = self.body(x)
        return self.first(body), self.second(body)


def test_a_part_that_has_no_share_in_the_loss_of_this_phase_is_not_dead():
    def weighted(model, x, step):
        first, second = model(x)
        return first.square().mean() + 0.0 * (second - 1).square().mean()

    assert alarms(train(TwoHeads(), weighted)) == []

    def unused(model, x, step):
        return model(x)[0].square().mean()

    model = TwoHeads()
    assert alarms(train(model, unused, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))) == []


def test_frozen_layers_and_those_that_start_at_zero_are_not_dead():
    frozen = killed(net(), 0)
    for module in frozen[:3]:
        module.requires_grad_(False)
    assert alarms(train(frozen)) == []
    zero = net()
    nn.init.zeros_(zero[4].weight)
    assert alarms(train(zero)) == []


def test_a_layer_that_comes_back_before_it_was_looked_at_raises_nothing():
    model = killed(net())

    def revived(model, x, step):
        if step == STEPS + 1:
            nn.init.zeros_(model[2].bias)
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    assert alarms(train(model, revived)) == []
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_outlives_the_stabilizer_in_the_middle_of_a_look_carries_no_hook():
    model = killed(net())
    stabilizer = train(model, steps=STEPS + 1)
    assert any(module._forward_hooks for module in model.modules())
    del stabilizer
    gc.collect()
    assert not any(module._forward_hooks for module in model.modules())


def test_parameters_are_bitwise_those_of_the_bare_loop_while_it_looks():
    ends = []
    for guarded in (True, False):
        model = killed(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        stabilizer = sf.TrainingStabilizer(model, optimizer) if guarded else None
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS + 10):
            x = torch.randn(16, 6, generator=generator)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            if stabilizer is not None:
                stabilizer.backward(loss)
                stabilizer.step()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


class TwoInputs(nn.Module):
    """Text and an optional image, which is all zeros where there is none."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(8, 16), nn.Linear(8, 16)
        self.fuse, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
        nn.init.zeros_(self.image.bias)

    def forward(self, text, image):
        return self.head(torch.relu(self.text(text)) + self.fuse(torch.relu(self.image(image))))


def test_a_layer_whose_input_is_absent_is_not_dead():
    torch.manual_seed(0)
    model = TwoInputs()
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(80):
        text = torch.randn(16, 8)
        stabilizer.backward((model(text, torch.zeros(16, 8)) - text.sum(1, keepdim=True)).square().mean())
        stabilizer.step()
    assert [incident.kind for incident in stabilizer.incidents] == []


def test_a_layer_that_is_not_called_again_is_not_waited_for():
    torch.manual_seed(0)
    model = TwoInputs()
    nn.init.constant_(model.image.bias, -100.0)  # dead, so that a look at its outputs begins
    stabilizer = sf.TrainingStabilizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    hooks = []
    for step in range(160):
        text = torch.randn(16, 8)
        image = model.image(torch.randn(16, 8)) if step <= STEPS else torch.zeros(16, 16)
        out = model.head(torch.relu(model.text(text)) + model.fuse(torch.relu(image)))
        unused = sum(0 * parameter.sum() for parameter in model.image.parameters())  # a gradient of 0, without a call
        stabilizer.backward((out - text.sum(1, keepdim=True)).square().mean() + unused)
        stabilizer.step()
        hooks.append(len(model.image._forward_hooks))
    assert max(hooks) == 1
    assert hooks[-1] == 0
