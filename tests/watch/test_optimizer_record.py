"""What is asked of an optimizer's parameters outside of sampled steps."""

import torch

from surefoot.watch.optimizer_record import least, left_share
from watched import CLASSES, LOOP, NET


def test_the_share_of_parameters_that_still_have_a_gradient():
    tensors = [torch.ones(2, requires_grad=True) for _ in range(4)]
    tensors[0].grad = torch.ones(2)
    tensors[1].grad = torch.zeros(2)
    assert left_share(tensors) == 0.25
    assert least([0.5, 0.25]) == 0.25
    assert least([torch.tensor(0.5), 0.25]).item() == 0.25


WRAPPED = """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        inner.load_state_dict(inner.state_dict())

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
inner = torch.optim.Adam(model.parameters(), lr=1e-2)
optimizer = Wrapper(inner)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
"""
SCHEDULED = LOOP.replace("    optimizer.step()", "    optimizer.step()\n    schedule.step()")


def test_an_optimizer_that_wraps_another_is_not_a_second_one(watch):
    run = watch(CLASSES, "loss_of = F.cross_entropy", WRAPPED, SCHEDULED)
    assert [(each["type"], each["steps"]) for each in run.facts["optimizers"]] == [("Adam", 60)]
    assert [each["optimizer"] for each in run.facts["schedulers"]] == [0]
    assert run.causes == []


PREPARED = """
import sys
from pathlib import Path

folder = Path("site-packages/lib_of_test")
folder.mkdir(parents=True)
(folder / "__init__.py").write_text('''
def prepare(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())  # to move it to its device
''')
sys.path.insert(0, "site-packages")
import lib_of_test

lib_of_test.prepare(optimizer)
"""


def test_a_new_optimizer_that_a_library_loads_with_its_own_state_was_not_resumed(watch):
    run = watch(CLASSES, "loss_of = F.cross_entropy", NET, PREPARED, LOOP)
    assert [each["state_loaded_at_step"] for each in run.facts["optimizers"]] == [None]
    assert [each["event"] for each in run.facts["events"]] == []
    ours = watch(CLASSES, "loss_of = F.cross_entropy", NET, "optimizer.load_state_dict(optimizer.state_dict())", LOOP)
    assert [each["state_loaded_at_step"] for each in ours.facts["optimizers"]] == [0]


def test_every_step_counts_when_a_second_optimizer_takes_over(watch):
    second = "optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)"
    run = watch(CLASSES, "loss_of = F.cross_entropy", NET, LOOP, second, LOOP)
    assert [each["steps"] for each in run.facts["optimizers"]] == [60, 60]
    assert run.facts["steps"] == 120
