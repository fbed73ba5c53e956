"""`TrainingRecovery(repeat=True)`: steps that a return undoes are taken once more, and the run is where it would be."""

import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import surefoot as sf
from surefoot.record.reading import load_run

PASS, EPOCHS, BATCH = 40, 3, 16
STEPS = PASS * EPOCHS
FAULT_AT = 70
LENIENT = sf.StabilityChecker(explosion=None, spike=None)
"""Refuses no step for the size of its gradient, so that a bad batch reaches the weights."""


class Rows(Dataset):
    """Rows with noise that is drawn when they are loaded, as augmentation is."""

    def __init__(self):
        self.x = torch.randn(PASS * BATCH, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] + 0.01 * torch.randn(6) + 0.01 * np.random.rand() + 0.01 * random.random()
        return x, self.x[index].sum().sin()[None]


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Loop:
    """A small regression; `tamper` may change what belongs to a step."""

    def __init__(self, tamper=lambda loop, step, x, y: (x, y), *, workers=0, accumulate=1, sgd=False, **settings):
        seed(0)
        self.model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 1))
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, 0.05, 0.9) if sgd else torch.optim.AdamW(parameters, lr=0.01)
        self.scheduler = sf.warmup_cosine(self.optimizer, warmup_steps=10, total_steps=STEPS // accumulate)
        self.loader = DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        self.tamper, self.accumulate, self.drawn, self.rates = tamper, accumulate, 0, {}
        self.stabilizer = None
        self.settings = settings

    def guarded(self, **settings):
        given = {"checker": LENIENT, "recovery": sf.TrainingRecovery(repeat=True), "accumulate": self.accumulate}
        self.stabilizer = sf.TrainingStabilizer(
            self.model, self.optimizer, scheduler=self.scheduler, **{**given, **self.settings, **settings}
        )
        return self

    def loss(self, x, y):
        return (self.model(x) - y).square().mean()

    def batches(self):
        return self.stabilizer.resume(self.loader, epochs=EPOCHS)

    def run(self, stop_after=None):
        for x, y in self.batches():
            step = self.stabilizer.steps
            self.drawn += 1
            x, y = self.tamper(self, step, x, y)
            self.stabilizer.backward(self.loss(x, y))
            self.rates[step] = self.optimizer.param_groups[0]["lr"]
            self.stabilizer.step()
            if self.drawn == stop_after:
                break
        return self

    def bare(self, without=()):
        """The plain loop, which draws the batches of some steps and does not use them."""
        batches = (batch for _ in range(EPOCHS) for batch in self.loader)
        for step in range(STEPS // self.accumulate):
            for _ in range(self.accumulate):
                x, y = next(batches)
                if step not in without:
                    (self.loss(x, y) / self.accumulate).backward()
            if step not in without:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    @property
    def actions(self):
        return [each.action for each in self.stabilizer.incidents if each.kind.startswith("recovery")]

    def is_like(self, other):
        mine, others = self.model.state_dict(), other.model.state_dict()
        same_moments = all(
            torch.equal(value, other.optimizer.state[there][name])
            for here, there in zip(self.model.parameters(), other.model.parameters(), strict=True)
            for name, value in self.optimizer.state[here].items()
        )
        return same_moments and all(torch.equal(mine[name], others[name]) for name in mine)


def once(change):
    """Damage by accident: at one step, and not when it is repeated."""
    done = []

    def tamper(loop, step, x, y):
        if step == FAULT_AT // loop.accumulate and not done:
            done.append(step)
            with torch.no_grad():
                change(loop)
        return x, y

    return tamper


ACCIDENTS = {
    "a NaN weight": lambda loop: loop.model[0].weight.view(-1)[3].fill_(torch.nan),
    "a layer times -20": lambda loop: loop.model[4].weight.data.mul_(-20),
    "a bias of 50": lambda loop: loop.model[4].bias.data.fill_(50.0),
}


def bad_batch(loop, step, x, y):
    """Finite, and far from anything there is: one step on it throws the weights far away."""
    return (x, 200 * y) if step == FAULT_AT // loop.accumulate else (x, y)


@pytest.fixture(scope="module")
def clean():
    return Loop().bare()


def test_a_healthy_run_is_the_bare_one(clean):
    loop = Loop().guarded().run()
    assert loop.is_like(clean)
    assert loop.drawn == STEPS
    assert "repeated" not in loop.stabilizer.counts


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_after_an_accident_the_run_is_bitwise_the_one_without_it(accident, clean):
    loop = Loop(once(ACCIDENTS[accident])).guarded().run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(clean)
    assert loop.stabilizer.steps == STEPS
    assert loop.drawn == STEPS + loop.stabilizer.counts["repeated"]


def test_without_a_bad_batch_the_run_is_bitwise_the_one_that_never_had_it():
    loop = Loop(bad_batch, sgd=True).guarded().run()
    assert loop.actions == ["repeat", "repeat"]
    assert loop.is_like(Loop(sgd=True).bare(without=[FAULT_AT]))


def nan_batch(loop, step, x, y):
    return (x, torch.nan * y) if step == FAULT_AT else (x, y)


def nan_once():
    done = []

    def tamper(loop, step, x, y):
        return x, torch.nan * y if step == FAULT_AT and not done and not done.append(step) else y

    return tamper


def skips_listed(loop):
    return [line for line in loop.stabilizer.summary().splitlines() if "step skipped" in line]


def test_a_step_that_was_refused_by_accident_is_repeated(clean):
    loop = Loop(nan_once()).guarded(checker=None).run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(clean)
    assert loop.stabilizer.counts["skipped"] == 0
    assert not skips_listed(loop), "it is undone"
    assert f"step {FAULT_AT}: nonfinite" in loop.stabilizer.summary()


def test_a_step_that_is_refused_again_is_skipped():
    loop = Loop(nan_batch).guarded(checker=None).run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(Loop(nan_batch).guarded(checker=None, recovery=None).run())
    assert loop.stabilizer.counts["skipped"] == len(skips_listed(loop)) == 1


@pytest.mark.parametrize(("tamper", "said"), [(nan_batch, "1 of 120 steps was skipped"), (nan_once(), "1 incident")])
def test_a_diagnosis_names_the_step_of_a_repeat_and_not_the_one_returned_to(tmp_path, tamper, said):
    loop = Loop(tamper).guarded(checker=None, log=tmp_path).run()
    loop.stabilizer.log.close(timeout=300)
    assert f"{said}, at step {FAULT_AT} (" in sf.diagnose(tmp_path).reason


def test_overflows_of_several_steps_by_accident_are_undone():
    """A smaller loss scale does not help against them, so these steps were lost and the scale stayed low."""

    def trained(tamper):
        return Loop(tamper).guarded(checker=None, scaler=sf.DynamicLossScaler()).run()

    broken = []

    def tamper(loop, step, x, y):
        if not step:
            for parameter in loop.model.parameters():
                parameter.register_hook(lambda gradient: gradient * (torch.inf if broken[-1] else 1))
        broken.append(FAULT_AT <= step < FAULT_AT + 6 and len(broken) < FAULT_AT + 6)
        return x, y

    loop = trained(tamper)
    assert loop.actions == ["repeat"]
    assert loop.stabilizer.counts["overflows"] == 0
    assert loop.is_like(trained(lambda loop, step, x, y: (x, y)))


def test_gradients_that_were_far_too_large_by_accident_are_undone(clean):
    """Adam hardly moves further in these steps, and hardly at all for a long time after them."""
    scaled = []

    def tamper(loop, step, x, y):
        if not step:
            for parameter in loop.model.parameters():
                parameter.register_hook(lambda gradient: gradient * (30 if scaled[-1:] == [True] else 1))
        scaled.append(FAULT_AT <= step < FAULT_AT + 5 and len(scaled) < FAULT_AT + 5)
        return x, y

    loop = Loop(tamper).guarded(checker=None).run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(clean)


def test_gradients_with_the_wrong_sign_by_accident_are_undone():
    """The loss rises little by little, too little for a return, and no gradient is unusual."""

    class EasyLoop(Loop):
        def loss(self, x, y):
            return (self.model(x) - 0.2 * x[:, :1]).square().mean()

    steps, done = range(FAULT_AT, FAULT_AT + 10), set()

    def tamper(loop, step, x, y):
        if not step:
            for parameter in loop.model.parameters():
                parameter.register_hook(lambda gradient: gradient * (-1 if loop.is_wrong else 1))
        loop.is_wrong = step in steps and step not in done
        done.add(step)
        return x, y

    loop = EasyLoop(tamper, sgd=True).guarded(checker=None).run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(EasyLoop(sgd=True).bare())


def test_a_series_of_bad_batches_that_damaged_the_weights_is_left_out():
    series = range(FAULT_AT, FAULT_AT + 8)

    def tamper(loop, step, x, y):
        return (x, -20 * y) if step in series else (x, y)

    loop = Loop(tamper, sgd=True).guarded().run()
    assert loop.actions == ["repeat", "repeat"]
    assert any("series of bad batches" in each.summary for each in loop.stabilizer.incidents)
    assert loop.is_like(Loop(sgd=True).bare(without=series))


def test_other_data_is_repeated_once_and_nothing_of_it_is_left_out():
    def tamper(loop, step, x, y):
        return (x, 3 - 4 * y) if step >= FAULT_AT else (x, y)

    loop = Loop(tamper).guarded().run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(Loop(tamper).guarded(recovery=None).run())


def test_refused_steps_still_end_a_run_whose_data_cannot_be_rewound():
    class GeneratorLoop(Loop):
        def batches(self):
            return self.stabilizer.resume(batch for _ in range(EPOCHS) for batch in self.loader)

    def tamper(loop, step, x, y):
        return x, torch.nan * y if step >= FAULT_AT else y

    escalation = sf.Escalation(skips=2, cuts=1)
    with pytest.raises(sf.TrainingHalted):
        GeneratorLoop(tamper).guarded(checker=None, escalation=escalation).run()


def test_counts_history_and_schedule_are_those_of_the_repeated_run():
    loop = Loop(bad_batch, sgd=True).guarded().run()
    counts = loop.stabilizer.counts
    assert (counts["steps"], counts["applied"], counts["skipped"]) == (STEPS, STEPS - 1, 1)
    steps = [record.signals.step for record in loop.stabilizer.history]
    assert steps == list(range(STEPS))
    assert [record.signals.step for record in loop.stabilizer.history if record.skipped] == [FAULT_AT]
    reference = Loop(sgd=True)
    rates = [reference.scheduler.get_last_lr()[0]]
    for _ in range(STEPS - 1):
        reference.optimizer._opt_called = True
        reference.scheduler.step()
        rates.append(reference.scheduler.get_last_lr()[0])
    del rates[FAULT_AT]
    loop.rates.pop(FAULT_AT)
    assert list(loop.rates.values()) == rates


def test_inside_accumulation_the_microbatches_of_the_step_are_left_out_together():
    settings = {"accumulate": 2, "sgd": True}
    loop = Loop(bad_batch, **settings).guarded().run()
    assert loop.actions == ["repeat", "repeat"]
    assert loop.is_like(Loop(**settings).bare(without=[FAULT_AT // 2]))


def test_with_workers_the_batches_come_again_with_their_random_numbers():
    loop = Loop(bad_batch, workers=2, sgd=True).guarded().run()
    assert loop.actions == ["repeat", "repeat"]
    assert loop.is_like(Loop(workers=2, sgd=True).bare(without=[FAULT_AT]))


def test_a_return_at_the_end_of_a_pass_goes_back_into_the_pass_before(clean):
    def tamper(loop, step, x, y):
        return damage(loop, step, x, y) if step >= PASS + 1 else (x, y)

    done = []

    def damage(loop, step, x, y):
        if not done:
            done.append(step)
            with torch.no_grad():
                loop.model[4].weight.data.mul_(-20)
        return x, y

    loop = Loop(tamper).guarded().run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(clean)


class EpochLoop(Loop):
    """The same with a loop over epochs of its own."""

    def batches(self):
        for _ in self.stabilizer.epochs(EPOCHS):
            yield from self.stabilizer.resume(self.loader)


def test_a_loop_that_is_left_at_a_return_continues_with_the_weights_returned_to():
    loop = Loop(once(ACCIDENTS["a NaN weight"])).guarded()
    for _ in range(2):
        for x, y in loop.stabilizer.resume(loop.loader, epochs=2):
            loop.tamper(loop, loop.stabilizer.steps, x, y)
            loop.stabilizer.backward(loop.loss(x, y))
            loop.stabilizer.step()
            if loop.stabilizer.steps == FAULT_AT + 1:
                break
    assert loop.actions == ["repeat"]
    assert loop.stabilizer.steps == FAULT_AT + 1 + 2 * PASS
    assert all(bool(each.isfinite().all()) for each in loop.model.parameters())


def test_in_a_loop_over_epochs_the_steps_of_the_epoch_are_repeated(clean):
    loop = EpochLoop(once(ACCIDENTS["a layer times -20"])).guarded().run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(clean)


def test_data_that_cannot_be_rewound_are_gone_on_with_and_that_is_said_once():
    class GeneratorLoop(Loop):
        def batches(self):
            return self.stabilizer.resume(batch for _ in range(EPOCHS) for batch in self.loader)

    loop = GeneratorLoop(once(ACCIDENTS["a NaN weight"])).guarded().run()
    assert loop.actions == ["none", "roll_back"]
    said = next(each.summary for each in loop.stabilizer.incidents if each.kind == "recovery.not-repeated")
    assert "a generator cannot start in the middle" in said
    assert loop.drawn == STEPS


def test_a_loop_that_does_not_use_resume_returns_to_earlier_weights():
    class OwnLoop(Loop):
        def batches(self):
            return (batch for _ in range(EPOCHS) for batch in self.loader)

    loop = OwnLoop(once(ACCIDENTS["a NaN weight"])).guarded().run()
    assert loop.actions == ["none", "roll_back"]
    assert "not drawn from" in loop.stabilizer.incidents[1].summary


def test_an_attached_guard_returns_to_earlier_weights_and_says_so():
    loop = Loop(once(ACCIDENTS["a NaN weight"]))
    guard = sf.attach(loop.model, loop.optimizer, recovery=sf.TrainingRecovery(repeat=True))
    for step, (x, y) in enumerate(batch for _ in range(EPOCHS) for batch in loop.loader):
        loop.tamper(loop, step, x, y)
        loop.optimizer.zero_grad()
        loss = loop.loss(x, y)
        guard.observe_loss(loss) if hasattr(guard, "observe_loss") else None
        loss.backward()
        loop.optimizer.step()
    kinds = [each.kind for each in guard.incidents if each.kind.startswith("recovery")]
    assert kinds[:2] == ["recovery.not-repeated", "recovery"]


def test_damage_that_comes_back_whatever_is_left_out_ends_bounded():
    def every_time(loop, step, x, y):
        if step >= FAULT_AT:
            with torch.no_grad():
                loop.model[4].weight.fill_(torch.nan)
        return x, y

    loop = Loop(every_time).guarded(escalation=None)
    with pytest.raises(sf.TrainingHalted):
        loop.run()
    assert loop.actions.count("repeat") == 3
    assert 1 <= loop.actions.count("roll_back") <= 3
    assert loop.drawn < 3 * STEPS


def typo_in_rate(wrong):
    def tamper(loop, step, x, y):
        loop.optimizer.param_groups[0]["lr"] = wrong if FAULT_AT <= step < FAULT_AT + 20 else 0.01
        return x, y

    return tamper


def test_the_steps_at_a_rate_that_was_raised_by_mistake_are_repeated_at_the_rate_before():
    loop, clean = Loop(typo_in_rate(1.0)).guarded().run(), Loop(typo_in_rate(0.01)).guarded().run()
    assert loop.actions == ["repeat"]
    rates = [record.signals.lr for record in loop.stabilizer.history]
    assert rates == pytest.approx([0.01] * STEPS)
    for mine, others in zip(loop.model.parameters(), clean.model.parameters(), strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-3, atol=1e-4)
    assert loop.rates[FAULT_AT + 5] == 1.0


def test_the_log_shows_each_step_once_with_the_numbers_of_the_run_that_counts(tmp_path):
    loop = Loop(bad_batch, sgd=True).guarded(log=tmp_path).run()
    loop.stabilizer.log.close(timeout=300)
    run = load_run(tmp_path)
    rows = run.scalars.to_pydict()
    assert rows["step"] == list(range(STEPS))
    expected = {record.signals.step: record.signals.loss for record in loop.stabilizer.history}
    assert {step: loss for step, loss in zip(rows["step"], rows["loss"], strict=True) if step != FAULT_AT} == {
        step: pytest.approx(loss) for step, loss in expected.items() if step != FAULT_AT
    }
    assert [step for step, skipped in zip(rows["step"], rows["skipped"], strict=True) if skipped] == [FAULT_AT]
    returns = [event for event in run.events if event.event == "rollback"]
    assert [(event.step, event.action) for event in returns] == [(59, "repeat"), (59, "repeat")]
    assert "without the batches of step 70" in returns[1].summary


def test_checkpoints_of_undone_steps_are_evidence(tmp_path):
    manager = sf.CheckpointManager(tmp_path, every_steps=5, keep_last=10, keep_evidence=10)
    too_new = []

    def tamper(loop, step, x, y):
        too_new.extend(each.step for each in manager.checkpoints() if each.good and each.step > step)
        if step > 100:
            manager.wait()  # a slow disk must not postpone the last save beyond the end of the run
        return bad_batch(loop, step, x, y)

    loop = Loop(tamper, sgd=True).guarded(checkpoints=manager).run()
    manager.wait()
    assert loop.actions == ["repeat", "repeat"]
    assert not too_new
    assert list((tmp_path / "checkpoints").glob("*.evidence"))
    assert manager.load("good").step == STEPS


@pytest.mark.parametrize("at", [58, 59, 61, 64, 67, 75])
def test_whether_a_bad_batch_is_undone_does_not_depend_on_the_age_of_the_last_snapshot(at):
    """With momentum, the bad step itself is a small part of the damage, and the steps since a snapshot dilute it."""

    def tamper(loop, step, x, y):
        return (x, 200 * y) if step == at else (x, y)

    loop = Loop(tamper, sgd=True).guarded().run()
    assert loop.is_like(Loop(sgd=True).bare(without=[at]))


@pytest.mark.parametrize(
    ("stop_after", "lost"), [(60, 0), (60, 5), (60, 6), (72, 0), (85, 0), (92, 1), (100, 0), (115, 0)]
)
def test_a_run_that_dies_in_the_middle_of_a_repeat_ends_bitwise_the_same(tmp_path, stop_after, lost):
    """… also if its last checkpoints were `lost`: it continues from an older one, with other moments in memory."""
    reference = Loop(sgd=True).bare(without=[FAULT_AT])

    def guarded():
        manager = sf.CheckpointManager(tmp_path, every_steps=5, keep_last=8)
        return Loop(bad_batch, sgd=True).guarded(checkpoints=manager)

    first = guarded().run(stop_after)
    manager = first.stabilizer._run.persistence.checkpoints
    manager.wait()
    for checkpoint in manager.checkpoints()[:lost]:
        shutil.rmtree(checkpoint.path)
    manager._claim.release()
    seed(99)
    second = guarded().run()
    assert second.is_like(reference)


def test_what_is_saved_with_the_run_goes_back_with_it(clean):
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))

    class Averaging(Loop):
        def run(self):
            nonlocal average
            average = torch.optim.swa_utils.AveragedModel(
                self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            self.guarded(also_save={"average": average})
            for x, y in self.batches():
                x, y = self.tamper(self, self.stabilizer.steps, x, y)
                self.stabilizer.backward(self.loss(x, y))
                self.stabilizer.step()
                average.update_parameters(self.model)
            return average

    expected = Averaging().run()
    found = Averaging(once(ACCIDENTS["a layer times -20"])).run()
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))


def test_decided_on_the_device_the_steps_since_are_repeated_too(clean):
    settings = {"decide_on": "device", "lag_steps": 3}
    loop = Loop(once(ACCIDENTS["a layer times -20"])).guarded(**settings).run()
    assert loop.actions == ["repeat"]
    assert loop.is_like(clean)
