"""What a loop steps beside the stabilizer: what does harm is reported once, everything else is not."""

from __future__ import annotations

import gc
import textwrap
import weakref

import pytest
import torch

import surefoot as sf

BEGIN = """
    import torch
    import surefoot as sf
    from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(8, 4) for _ in range(6)]
    saved = sf.CheckpointManager(FOLDER, every_steps=5)

    def loss_of(x):
        return model(x).square().mean()
"""


def warned(tmp_path, script: str, begin: str = BEGIN) -> dict[str, str]:
    """The incidents of a script's `stabilizer`, by kind; `HERE` in a summary is the line that ends with `# HERE`."""
    source = textwrap.dedent(begin) + textwrap.dedent(script)
    path = tmp_path / "train.py"
    path.write_text(source)
    scope = {"FOLDER": tmp_path / "run", "__name__": "__main__"}
    exec(compile(source, str(path), "exec"), scope)
    lines = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# HERE")]
    found = {}
    for incident in scope["stabilizer"].incidents:
        assert incident.kind not in found, "reported twice"
        found[incident.kind] = incident.summary.replace(f"train.py:{lines[0]}" if lines else "-", "HERE")
    return found


@pytest.mark.parametrize(
    "loop",
    [
        "stabilizer.backward(loss_of(x)); optimizer.step()  # HERE\n    stabilizer.step()",
        "loss_of(x).backward(); optimizer.step()  # HERE\n    stabilizer.step()",
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_the_loop_applies_as_well_are_reported_with_the_line(tmp_path, loop, fused):
    begin = BEGIN.replace("lr=0.01", f"lr=0.01, fused={fused}")
    found = warned(
        tmp_path, f"stabilizer = sf.TrainingStabilizer(model, optimizer)\nfor x in batches:\n    {loop}", begin
    )
    assert list(found) == ["optim.stepped-twice"]
    assert "HERE" in found["optim.stepped-twice"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_after_the_stabilizers_on_gradients_that_it_keeps_is_reported(tmp_path, fused):
    script = """
    stabilizer = sf.TrainingStabilizer(model, optimizer, zero_grad=False)
    for x in batches:
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        optimizer.step()  # HERE
        optimizer.zero_grad()
    """
    found = warned(tmp_path, script, BEGIN.replace("lr=0.01", f"lr=0.01, fused={fused}"))
    assert list(found) == ["optim.stepped-twice"]
    assert "HERE" in found["optim.stepped-twice"]


def test_gradients_that_the_loop_has_applied_and_deleted_are_explained(tmp_path):
    script = """
    stabilizer = sf.TrainingStabilizer(model, optimizer)
    for x in batches:
        stabilizer.backward(loss_of(x))
        optimizer.step()  # HERE
        optimizer.zero_grad()
        stabilizer.step()
    """
    found = warned(tmp_path, script)
    assert list(found) == ["optim.no-gradient"]
    assert "HERE has applied them" in found["optim.no-gradient"]


def test_a_given_scheduler_that_the_loop_steps_too_is_reported(tmp_path):
    script = """
    scheduler = CosineAnnealingLR(optimizer, 100)
    stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=scheduler)
    for x in batches:
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        scheduler.step()
    """
    assert list(warned(tmp_path, script)) == ["lr.schedule-stepped-twice"]


UNSAVED = {
    "in the same function": """
    scheduler = CosineAnnealingLR(optimizer, 100)
    stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=saved)
    for x in stabilizer.resume(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        scheduler.step()
    """,
    "in the function around it, as an attribute": """
    class Training:
        def __init__(self):
            self.schedule = StepLR(optimizer, 1000)
            self.stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=saved)

        def one_batch(self, x):
            self.stabilizer.backward(loss_of(x))
            self.stabilizer.step()

        def run(self):
            for x in self.stabilizer.resume(batches):
                self.one_batch(x)
                self.schedule.step()

    training = Training()
    training.run()
    stabilizer = training.stabilizer
    """,
    "a sequence of two": """
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 9)], milestones=[3])
    stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=saved)
    for x in stabilizer.resume(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        scheduler.step()
    """,
}


@pytest.mark.parametrize("where", UNSAVED)
def test_a_scheduler_that_no_checkpoint_contains_is_reported(tmp_path, where):
    found = warned(tmp_path, UNSAVED[where])
    assert list(found) == ["resume.scheduler-not-saved"]
    assert "LR that your loop steps" in found["resume.scheduler-not-saved"]
    assert "unless your script restores it" in found["resume.scheduler-not-saved"]


HARMLESS = {
    "no checkpoints": """
    scheduler = CosineAnnealingLR(optimizer, 100)
    stabilizer = sf.TrainingStabilizer(model, optimizer)
    for x in batches:
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        scheduler.step()
    """,
    "a scheduler after every epoch": """
    scheduler = StepLR(optimizer, 2)
    stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=saved)
    for epoch in stabilizer.epochs(3):
        for x in stabilizer.resume(batches):
            stabilizer.backward(loss_of(x))
            stabilizer.step()
        scheduler.step()
    """,
    "the scheduler of another optimizer": """
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = StepLR(other, 2)
    stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=StepLR(optimizer, 2), checkpoints=saved)
    for x in stabilizer.resume(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        other.step()
        scheduler.step()
    """,
    "a scheduler in also_save": """
    scheduler = CosineAnnealingLR(optimizer, 100)
    stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=saved, also_save={"scheduler": scheduler})
    for x in stabilizer.resume(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        scheduler.step()
    """,
    "a scheduler inside an object of also_save": """
    class Progress:
        def __init__(self, scheduler):
            self.parts = [scheduler]
        def state_dict(self):
            return {"part": self.parts[0].state_dict()}
        def load_state_dict(self, state):
            self.parts[0].load_state_dict(state["part"])

    scheduler = CosineAnnealingLR(optimizer, 100)
    also = {"progress": Progress(scheduler)}
    stabilizer = sf.TrainingStabilizer(model, optimizer, checkpoints=saved, also_save=also)
    for x in stabilizer.resume(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        scheduler.step()
    """,
    "a warm-up that steps the scheduler it was given": """
    class WarmUp:
        def __init__(self, after):
            self.after, self.count, self.optimizer = after, 0, optimizer
        def step(self):
            self.count += 1
            if self.count > 2:
                self.after.step()
        def state_dict(self):
            return {"count": self.count, "after": self.after.state_dict()}
        def load_state_dict(self, state):
            self.count = state["count"]

    scheduler = CosineAnnealingLR(optimizer, 100)
    stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=WarmUp(scheduler), checkpoints=saved)
    for x in stabilizer.resume(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
    """,
    "a given scheduler that is set forward once": """
    scheduler = CosineAnnealingLR(optimizer, 100)
    stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=scheduler)
    for number, x in enumerate(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        if number == 2:
            scheduler.step()
    """,
    "a phase with bare steps before the guarded one": """
    stabilizer = sf.TrainingStabilizer(model, optimizer, zero_grad=False)
    for x in batches:
        optimizer.zero_grad()
        loss_of(x).backward()
        optimizer.step()
    for x in batches:
        optimizer.zero_grad()
        stabilizer.backward(loss_of(x))
        stabilizer.step()
    for x in batches:
        optimizer.zero_grad(set_to_none=False)
        loss_of(x).backward()
        optimizer.step()
    """,
    "a bare step without gradients": """
    stabilizer = sf.TrainingStabilizer(model, optimizer)
    for x in batches:
        stabilizer.backward(loss_of(x))
        stabilizer.step()
        optimizer.step()
    """,
    "two optimizers, of which one is guarded": """
    head = torch.nn.Linear(4, 1)
    bare = torch.optim.SGD(head.parameters(), lr=0.01)
    stabilizer = sf.TrainingStabilizer(model, optimizer)
    for x in batches:
        bare.zero_grad()
        stabilizer.backward(loss_of(x) + head(x).square().mean())
        bare.step()
        stabilizer.step()
    """,
    "two stabilizers, as of a GAN": """
    critic = torch.nn.Linear(4, 1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    second = sf.TrainingStabilizer(critic, of_critic, scheduler=StepLR(of_critic, 5))
    also = {"critic": second}
    stabilizer = sf.TrainingStabilizer(
        model, optimizer, scheduler=StepLR(optimizer, 5), checkpoints=saved, also_save=also
    )
    for x in stabilizer.resume(batches):
        second.backward(critic(x).square().mean())
        second.step()
        stabilizer.backward(loss_of(x))
        stabilizer.step()
    """,
    "a scheduler of its own that cannot be referred to weakly": """
    class Schedule:
        __slots__ = ("last_epoch",)
        def __init__(self):
            self.last_epoch = 0
        def step(self):
            self.last_epoch += 1
        def state_dict(self):
            return {"last_epoch": self.last_epoch}
        def load_state_dict(self, state):
            self.last_epoch = state["last_epoch"]

    stabilizer = sf.TrainingStabilizer(model, optimizer, scheduler=Schedule(), checkpoints=saved)
    for x in stabilizer.resume(batches):
        stabilizer.backward(loss_of(x))
        stabilizer.step()
    """,
    "a closure": """
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    stabilizer = sf.TrainingStabilizer(model, optimizer)
    for x in batches:
        def closure():
            optimizer.zero_grad()
            loss = loss_of(x)
            stabilizer.backward(loss)
            return loss
        stabilizer.step(closure)
    """,
}


@pytest.mark.parametrize("loop", HARMLESS)
def test_what_does_no_harm_is_not_reported(tmp_path, loop):
    assert warned(tmp_path, HARMLESS[loop]) == {}


def test_an_optimizer_keeps_no_stabilizer_and_no_hook_of_it():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stabilizer = weakref.ref(sf.TrainingStabilizer(model, optimizer))
    gc.collect()
    assert stabilizer() is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
