"""`TrainingRecovery` in a training loop: what is damaged is left behind, and what is not is left alone."""

import logging

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.guard.run_actions import has_raised_rate

STEPS = 240
FAULT_AT = 120


class Loop:
    """A small regression whose loop can be tampered with at any step."""

    def __init__(self, optimizer="adamw", seed=0, **settings):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
        make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
        self.optimizer = make(self.model.parameters(), lr=0.01 if optimizer == "adamw" else 0.05)
        settings.setdefault("recovery", sf.TrainingRecovery())
        self.stabilizer = sf.TrainingStabilizer(self.model, self.optimizer, **settings)

    def batch(self, step):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        return x, x.sum(1, keepdim=True).sin()

    def run(self, tamper=lambda step, x, y: None, before_step=lambda step: None, steps=STEPS):
        for step in range(steps):
            x, y = self.batch(step)
            with torch.no_grad():
                tamper(step, x, y)
            self.stabilizer.backward((self.model(x) - y).square().mean())
            before_step(step)
            self.stabilizer.step()
        return self

    @property
    def actions(self):
        return [incident.action for incident in self.stabilizer.incidents if incident.kind == "recovery"]

    def final_loss(self):
        with torch.no_grad():
            return sum(float((self.model(x) - y).square().mean()) for x, y in map(self.batch, range(-20, 0))) / 20


MOST_LOST = 60
"""Steps a fault may cost: those since the state returned to, those that were unhealthy, those at a smaller rate."""


@pytest.fixture(scope="module")
def clean():
    """The loss of a run without the fault and without so many steps."""
    return {kind: Loop(kind).run(steps=STEPS - MOST_LOST).final_loss() for kind in ("adamw", "sgd")}


def weights(loop, change):
    def tamper(step, x, y):
        if step == FAULT_AT:
            change(loop.model)

    return tamper


DAMAGES = {  # through `.data`, because memory that is corrupted does not change version counters
    "a NaN": lambda model: model[0].weight.view(-1)[3].fill_(torch.nan),
    "an Inf": lambda model: model[2].bias.fill_(torch.inf),
    "a layer times -20": lambda model: model[2].weight.data.mul_(-20),
    "a bias of 50": lambda model: model[2].bias.data.fill_(50.0),
    "noise": lambda model: model[2].weight.data.add_(
        5 * torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    ),
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_left_behind_at_the_cost_of_some_steps(damage, optimizer, clean):
    loop = Loop(optimizer)
    loop.run(weights(loop, DAMAGES[damage]))
    assert "roll_back" in loop.actions
    assert loop.final_loss() < 1.05 * clean[optimizer]


def test_poisoned_moments_are_left_behind(clean):
    loop = Loop()

    def poison(step):
        if step == FAULT_AT:
            for state in loop.optimizer.state.values():
                state["exp_avg_sq"].mul_(1e-10)

    loop.run(before_step=poison)
    assert "roll_back" in loop.actions
    assert loop.final_loss() < 1.05 * clean["adamw"]


def test_a_learning_rate_that_is_wrong_for_a_while_is_survived_and_stays_the_users(clean):
    loop = Loop()

    def typo(step):
        loop.optimizer.param_groups[0]["lr"] = 3.0 if FAULT_AT <= step < FAULT_AT + 15 else 0.01

    loop.run(before_step=typo)
    assert "roll_back" in loop.actions
    assert loop.optimizer.param_groups[0]["lr"] == 0.01
    assert loop.final_loss() < 1.05 * clean["adamw"]


def raised_rate(loop, steps, times=100.0):
    """Sets the rate of the next step, as a mistake in a loop or a schedule does."""

    def set_rate(step):
        loop.optimizer.param_groups[0]["lr"] = 0.01 * (times if FAULT_AT <= step < FAULT_AT + steps else 1.0)

    return {"before_step": set_rate}


@pytest.mark.parametrize("steps", [20, 60])
def test_after_steps_at_a_hundred_times_the_rate_the_run_ends_like_one_that_never_had_them(steps):
    loop = Loop()
    loop.run(**raised_rate(loop, steps))
    assert loop.actions == ["roll_back"]
    (incident,) = (each for each in loop.stabilizer.incidents if each.action == "roll_back")
    assert f"back to the state before step {FAULT_AT}, kept in memory" in incident.summary
    assert loop.final_loss() < 1.05 * Loop().run(steps=STEPS - 5).final_loss()


def test_a_rate_that_stays_raised_is_limited_to_the_one_before_and_approached_while_the_run_is_healthy():
    loop = Loop()
    loop.run(**raised_rate(loop, STEPS), steps=FAULT_AT + 55)
    rates = [record.signals.lr for record in loop.stabilizer.history[FAULT_AT:]]
    assert [rates[0], rates[10], rates[30], rates[50]] == pytest.approx([1.0, 0.01, 0.02, 0.04])
    assert loop.optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(("later", "actions"), [(0, []), (2, ["roll_back", "take_back"])])
def test_a_new_phase_with_other_data_and_a_higher_rate_keeps_its_rate(later, actions):
    loop, starts = Loop(), FAULT_AT + later
    loop.run(lambda step, x, y: y.add_(3) if step >= starts else None, **raised_rate(loop, STEPS, times=5.0))
    assert loop.actions == actions
    rates = [record.signals.lr for record in loop.stabilizer.history]
    assert rates[FAULT_AT + 10 :] == pytest.approx([0.05] * (STEPS - FAULT_AT - 10))


def test_a_rate_that_the_user_raises_without_harm_changes_nothing():
    loop, bare = Loop(), Loop(recovery=None, escalation=None)
    for each in (loop, bare):
        each.run(**raised_rate(each, STEPS, times=5.0))
    assert loop.actions == []
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), bare.model.parameters(), strict=True))


def test_some_high_losses_long_after_a_raise_lead_to_no_return():
    loop = Loop()
    high = (FAULT_AT + 20, FAULT_AT + 22, FAULT_AT + 24)
    loop.run(lambda step, x, y: y.add_(2) if step in high else None, **raised_rate(loop, STEPS, times=5.0))
    assert loop.actions == []


def test_the_cut_is_a_factor_for_the_step_and_is_lifted():
    loop = Loop()
    loop.run(weights(loop, DAMAGES["a NaN"]))
    rates = {record.signals.step: record.signals.lr for record in loop.stabilizer.history}
    assert rates[FAULT_AT] == pytest.approx(0.01)
    assert rates[FAULT_AT + 2] == pytest.approx(0.005)
    assert rates[FAULT_AT + 40] == pytest.approx(0.01)


def test_other_data_are_no_damage():
    loop, bare = Loop(), Loop(recovery=None, escalation=None)

    def shift(step, x, y):
        if step >= FAULT_AT:
            y.add_(3)

    loop.run(shift)
    bare.run(shift)
    assert loop.actions == []
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), bare.model.parameters(), strict=True))


def test_gradients_of_damaged_weights_lead_back_at_the_second_step():
    loop = Loop("sgd")
    loop.run(weights(loop, lambda model: model[2].weight.data.mul_(100)), steps=FAULT_AT + 2)
    assert [record.skipped for record in loop.stabilizer.history][FAULT_AT:] == [True, False]
    assert loop.actions == ["roll_back"]


def test_a_loss_of_another_scale_costs_one_step_and_no_return():
    loop = Loop()
    loop.run(lambda step, x, y: y.mul_(300) if step >= FAULT_AT else None)
    assert [record.signals.step for record in loop.stabilizer.history if record.skipped] == [FAULT_AT]
    assert loop.actions == []


def rows_of_two(loop):
    """The same task two rows at a time: single losses vary as much as the run has gained."""

    def batch(step):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        return x, x.sum(1, keepdim=True).sin()

    loop.batch = batch
    return loop


@pytest.mark.parametrize("seed", range(3))
def test_damage_within_the_noise_of_small_batches_is_left_behind(seed):
    """A learning rate times 100 for 20 steps, as by a typing mistake."""
    loop = rows_of_two(Loop(seed=seed))

    def typo(step):
        loop.optimizer.param_groups[0]["lr"] = 1.0 if 400 <= step < 420 else 0.01

    loop.run(before_step=typo, steps=700)
    returns = [i.step for i in loop.stabilizer.incidents if i.action == "roll_back"]
    assert returns
    assert 400 <= returns[0] <= 440
    undisturbed = rows_of_two(Loop(seed=seed)).run(steps=700)
    assert loop.final_loss() < 1.3 * undisturbed.final_loss()


def test_other_data_in_small_batches_are_no_damage():
    loop = rows_of_two(Loop())

    def shift(step, x, y):
        if step >= 400:
            y.add_(3)

    loop.run(shift, steps=700)
    assert loop.actions.count("roll_back") == loop.actions.count("take_back")


@pytest.mark.parametrize("after_restart", [0, 30])
def test_a_data_set_that_changes_at_a_restart_is_treated_like_one_that_changes_later(after_restart, tmp_path):
    first = Loop(checkpoints=sf.CheckpointManager(tmp_path, every_steps=1_000))
    first.run(steps=FAULT_AT)
    first.stabilizer.save()
    loop = Loop(checkpoints=sf.CheckpointManager(tmp_path, every_steps=1_000))
    assert loop.stabilizer.restore() == FAULT_AT

    def shift(step, x, y):
        if step >= after_restart:
            y.add_(3)

    loop.run(shift, steps=FAULT_AT)
    assert loop.actions == []
    assert loop.stabilizer.counts["skipped"] == 1  # the next step shows that it is a new level


def test_a_burst_of_nan_batches_is_skipped_and_nothing_is_returned_to():
    loop = Loop()

    def burst(step, x, y):
        if FAULT_AT <= step < FAULT_AT + 8:
            x[0] = torch.nan

    loop.run(burst)
    assert loop.actions == []
    assert loop.stabilizer.counts["skipped"] == 8


def test_a_return_that_does_not_help_is_taken_back():
    """Weights that moved and data that changed: the earlier weights do no better."""
    loop = Loop()

    def both(step, x, y):
        if step == FAULT_AT:
            loop.model[0].weight.data.add_(0.4)
        if step >= FAULT_AT:
            y.add_(4)

    loop.run(both, steps=FAULT_AT + 20)
    assert loop.actions[:2] == ["roll_back", "take_back"]
    assert loop.stabilizer._run.results.lr_factor == 1.0


def test_after_an_undone_return_the_new_level_of_the_loss_is_not_a_reason_for_another():
    loop = Loop()

    def both(step, x, y):
        if step == FAULT_AT:
            loop.model[0].weight.data.add_(0.4)
        if step >= FAULT_AT:
            y.copy_(4 * torch.randn(y.shape, generator=torch.Generator().manual_seed(step)))  # cannot be learned

    loop.run(both, steps=FAULT_AT + 200)
    assert loop.actions == ["roll_back", "take_back"]


@pytest.mark.parametrize(("rate", "is_raised"), [(1.0, True), (0.02, False), (0.01, False)])
def test_a_rate_is_raised_if_it_is_far_above_all_before_the_problem(rate, is_raised):
    loop = Loop()

    def change(step):
        loop.optimizer.param_groups[0]["lr"] = rate if step >= FAULT_AT else 0.01

    loop.run(lambda step, x, y: y.mul_(300) if step >= FAULT_AT else None, before_step=change, steps=FAULT_AT + 1)
    assert loop.stabilizer.history[-1].skipped
    assert has_raised_rate(loop.stabilizer._run.guard.history) is is_raised


def corrupted_policy(**settings):
    """A bounded output: with a matrix overwritten, it has no gradient, and no step and no loss shows it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = list(torch.randn(200, 16, 4, generator=torch.Generator().manual_seed(1)))
    checker = sf.StabilityChecker(setback=None, lost_progress=None)
    stabilizer = sf.TrainingStabilizer(model, optimizer, checker=checker, **settings)
    corrupted = False
    for x in stabilizer.resume(rows):
        if stabilizer.steps == 130 and not corrupted:
            corrupted = True
            model[2].weight.data[:4] = 1e3
        stabilizer.backward((model(x) - 0.5 * x[:, :1].sin()).square().mean())
        stabilizer.step()
    return model, stabilizer


def test_weights_that_were_overwritten_without_a_trace_in_loss_or_gradient_are_left_behind():
    model, stabilizer = corrupted_policy(recovery=sf.TrainingRecovery(repeat=True))
    (back,) = [each for each in stabilizer.incidents if each.kind == "recovery"]
    assert 140 <= back.step <= 148
    assert model[2].weight.abs().max() < 2
    assert stabilizer.counts["repeated"] > 0


@pytest.mark.parametrize("change", ["a layer is initialised again", "other weights are loaded"])
def test_what_the_script_itself_does_to_the_weights_is_not_undone(change):
    loop, other = Loop(), Loop()

    def rewrite(model):
        if change == "other weights are loaded":
            model.load_state_dict({name: 20 * value for name, value in other.model.state_dict().items()})
        else:
            nn.init.normal_(model[2].weight, std=20.0)

    loop.run(weights(loop, rewrite))
    assert loop.actions.count("roll_back") == 0
    assert "weights.jump" not in {each.kind for each in loop.stabilizer.incidents}


def test_what_the_script_itself_does_to_the_weights_is_damage_if_the_run_blows_up():
    loop = Loop()

    def rewrite(model):
        for parameter in model.parameters():
            parameter.mul_(1e4)

    loop.run(weights(loop, rewrite))
    assert "roll_back" in loop.actions
    assert max(parameter.abs().max() for parameter in loop.model.parameters()) < 100


def test_a_script_that_writes_to_the_weights_all_the_time_is_still_protected():
    loop = Loop()

    def decay(step, x, y):
        for parameter in loop.model.parameters():
            parameter.mul_(0.9999)
        if step == FAULT_AT:
            loop.model[2].weight.data.mul_(-20)

    loop.run(decay)
    assert "roll_back" in loop.actions


def test_moments_can_be_cleared_instead():
    loop = Loop(recovery=sf.TrainingRecovery(first="reset_moments"))

    def poison(step):
        if step == FAULT_AT:
            for state in loop.optimizer.state.values():
                state["exp_avg"].add_(3.0)

    loop.run(before_step=poison)
    assert loop.actions[0] == "reset_moments"


def test_when_every_attempt_is_used_up_the_run_halts_with_the_evidence(tmp_path):
    checkpoints = sf.CheckpointManager(tmp_path, every_steps=20)
    loop = Loop(checkpoints=checkpoints)

    def again_and_again(step, x, y):
        if step >= FAULT_AT and step % 8 == 0:
            loop.model[2].bias.fill_(torch.nan)

    with pytest.raises(sf.TrainingHalted, match="weights are not finite") as halted:
        loop.run(again_and_again)
    assert loop.actions == ["roll_back"] * 3
    assert "was saved to" in str(halted.value)
    evidence = checkpoints.checkpoints()[0]
    assert not evidence.finite
    assert checkpoints.load("good").step <= FAULT_AT


def test_without_snapshots_left_a_checkpoint_serves(tmp_path):
    loop = Loop(checkpoints=sf.CheckpointManager(tmp_path, every_steps=20), recovery=sf.TrainingRecovery(attempts=5))

    def tamper(step, x, y):
        if step == FAULT_AT:
            loop.stabilizer._run.persistence.weights.forget_snapshots()
            loop.model[2].bias.fill_(torch.nan)

    loop.run(tamper)
    assert loop.actions == ["roll_back"]
    assert "back to the checkpoint of step" in next(
        i.summary for i in loop.stabilizer.incidents if i.kind == "recovery"
    )
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())


def test_the_person_is_told_what_was_done(caplog):
    caplog.set_level(logging.WARNING, "surefoot")
    loop = Loop()
    loop.run(weights(loop, DAMAGES["a NaN"]))
    told = [record.getMessage() for record in caplog.records if "recovery" in record.getMessage()]
    assert len(told) == 1
    assert "the weights are not finite: back to the state before step" in told[0]
    assert "learning rate x 0.5" in told[0]


def test_a_healthy_run_is_the_bare_one():
    watched, bare = Loop().run(), Loop(recovery=None, escalation=None).run()
    assert all(torch.equal(a, b) for a, b in zip(watched.model.parameters(), bare.model.parameters(), strict=True))


def test_what_follows_the_weights_goes_back_with_them(tmp_path):
    class OwnAverage:
        """An average of the weights that is no module."""

        def __init__(self, model):
            self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

        def update(self, model):
            for mine, now in zip(self.shadow, model.parameters(), strict=True):
                mine.lerp_(now.detach(), 0.1)

        def state_dict(self):
            return {"shadow": self.shadow}

        def load_state_dict(self, state):
            for mine, saved in zip(self.shadow, state["shadow"], strict=True):
                mine.copy_(saved)

    class Counter:
        def __init__(self):
            self.steps = 0

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    loop = Loop()
    average, own, counter = torch.optim.swa_utils.AveragedModel(loop.model), OwnAverage(loop.model), Counter()
    loop.stabilizer = sf.TrainingStabilizer(
        loop.model,
        loop.optimizer,
        recovery=sf.TrainingRecovery(),
        also_save={"average": average, "own": own, "counter": counter},
    )
    damage = weights(loop, DAMAGES["a layer times -20"])

    def tamper(step, x, y):
        damage(step, x, y)
        if step == FAULT_AT:
            average.update_parameters(loop.model)
            average.module[2].weight.fill_(torch.nan)
            own.shadow[0].fill_(torch.nan)
        counter.steps += 1

    loop.run(tamper)
    assert "roll_back" in loop.actions
    assert all(bool(each.isfinite().all()) for each in (*average.parameters(), *own.shadow))
    assert counter.steps == STEPS  # time goes on
