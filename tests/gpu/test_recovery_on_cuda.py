"""Snapshots, returns, checkpoints and resume on a GPU."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.keep.snapshots import SnapshotRing, TrainedState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).cuda()


class Run:
    def __init__(self, folder=None, seed=0, fused=True, **settings):
        self.model = model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3, fused=fused)
        self.data = torch.randn(64, 32, 16, generator=torch.Generator().manual_seed(7)).cuda()
        if folder is not None:
            settings["checkpoints"] = sf.CheckpointManager(folder, every_steps=10)
        self.stabilizer = sf.TrainingStabilizer(self.model, self.optimizer, **settings)
        torch.manual_seed(seed)

    def train(self, batches, damage=None):
        for i, x in enumerate(batches):
            if damage is not None:
                damage(i)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.stabilizer.backward(loss)
            self.stabilizer.step()
        return float(loss.detach())

    def bits(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [t.clone() for t in (*self.model.state_dict().values(), *moments)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("device_bytes", [0, 10**10], ids=["pinned", "device"])
def test_a_snapshot_does_not_follow_training_and_comes_back_exactly(device_bytes):
    run = Run()
    run.train(run.data[:5])
    state = TrainedState([run.model], run.optimizer, list, lambda rules: None)
    ring = SnapshotRing(state, 1, 2, device_bytes)
    for round_ in range(4):
        before = run.bits()
        ring.take(round_)
        ring.before_update()
        run.train(run.data[5:9])
        assert not same(run.bits(), before)
        ring.return_to(round_, 0, keep_present=False)
        torch.cuda.synchronize()
        assert same(run.bits(), before)
        run.train(run.data[9:11])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [torch.nan, 1e4])
def test_damaged_weights_are_left_behind(fused, value):
    run = Run(fused=fused, recovery=sf.TrainingRecovery(every_steps=20))
    batches = run.data.repeat(6, 1, 1, 1).flatten(0, 1)

    def damage(i):
        if i == 200:
            with torch.no_grad():
                run.model[-1].weight.data[:, :20] = value

    loss = run.train(batches, damage)
    actions = [incident.action for incident in run.stabilizer.incidents]
    assert "roll_back" in actions
    assert loss < 2.0
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def test_a_healthy_run_with_recovery_is_the_bare_run():
    bare, watched = Run(), Run(recovery=sf.TrainingRecovery(every_steps=7))
    torch.manual_seed(1)
    for x in bare.data:
        loss = (bare.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        bare.optimizer.step()
        bare.optimizer.zero_grad()
    torch.manual_seed(1)
    watched.train(watched.data)
    assert same(bare.bits(), watched.bits())


@pytest.mark.parametrize("stop", [15, 23, 40])
def test_a_run_resumes_bit_for_bit(tmp_path, stop):
    whole = Run()
    loader = list(whole.data)
    torch.manual_seed(5)
    whole.train(whole.stabilizer.resume(loader))
    first = Run(tmp_path)
    torch.manual_seed(5)
    for i, x in enumerate(first.stabilizer.resume(loader)):
        first.train([x])
        if i == stop:
            break
    first.stabilizer._run.persistence.checkpoints.wait()
    second = Run(tmp_path, seed=99)
    second.train(second.stabilizer.resume(loader))
    assert same(whole.bits(), second.bits())


def test_snapshots_and_staging_make_the_host_wait_for_nothing(tmp_path):
    run = Run(tmp_path, recovery=sf.TrainingRecovery(every_steps=5))
    run.train(run.data[:30])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in run.data[30:60]:
            loss = (run.model(x) - x.sum(1, keepdim=True)).square().mean()
            run.stabilizer.backward(loss)
            run.stabilizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_repeated_steps_end_with_the_bits_of_the_run_without_the_accident():
    def trained(damaged):
        run = Run(recovery=sf.TrainingRecovery(repeat=True))
        batches = list(torch.randn(120, 32, 16, generator=torch.Generator().manual_seed(8)).cuda())
        done = not damaged
        for x in run.stabilizer.resume(batches):
            if run.stabilizer.steps == 70 and not done:
                done = True
                with torch.no_grad():
                    run.model[4].bias.fill_(torch.nan)
            run.stabilizer.backward((run.model(x) - x.sum(1, keepdim=True).sin()).square().mean())
            run.stabilizer.step()
        return run

    clean, repeated = trained(False), trained(True)
    assert repeated.stabilizer.counts["repeated"] > 0
    for one, other in zip(clean.model.state_dict().values(), repeated.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_broken_running_statistics_are_put_back_without_waiting():
    run = Run()
    for step in range(60):
        x = run.data[step % 64]
        run.stabilizer.backward(run.model(x).square().mean())
        run.stabilizer.step()
        if step == 24:
            with torch.no_grad():
                run.model(torch.full_like(x, torch.nan))
    assert all(bool(each.isfinite().all()) for each in run.model.buffers())
    assert "norm.broken-statistics" in [each.kind for each in run.stabilizer.incidents]


@pytest.mark.parametrize("fused", [True, False])
def test_a_rate_that_is_wrong_for_a_while_is_left_behind_though_the_batches_are_small(fused):
    run = Run(fused=fused, recovery=sf.TrainingRecovery())

    def typo(i):
        run.optimizer.param_groups[0]["lr"] = 0.3 if 200 <= i < 220 else 3e-3

    run.train([run.data[i % 64][:4] for i in range(320)], typo)
    returns = [incident.step for incident in run.stabilizer.incidents if incident.action == "roll_back"]
    assert returns
    assert 200 <= returns[0] < 245
