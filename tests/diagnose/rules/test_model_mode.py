"""Training in eval mode and evaluating in training mode, on real scripts; and modes that are unusual on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"
DROPOUT = NET.replace("nn.ReLU()", "nn.ReLU(), nn.Dropout(0.2)")
VALIDATE = """
    if step % 10 == 9:
        MODE
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean()
        AFTER
"""


def validating(mode: str, after: str = "pass") -> str:
    return LOOP + VALIDATE.replace("MODE", mode).replace("AFTER", after)


def test_a_model_left_in_eval_mode_is_named_from_its_first_step_there(watch: Nursery) -> None:
    run = watch(START, DROPOUT, validating("model.eval()"))
    found = run.names_first(
        "model.eval-mode-training",
        step=run.look_after(10),
        at="|loss = loss_of",
        evidence={"passes", "in_eval_mode", "dropouts", "batchnorms"},
    )
    assert (found.evidence["dropouts"], found.evidence["batchnorms"]) == (1, 0)


def test_one_sampled_step_in_eval_mode_after_an_evaluation_is_enough(watch: Nursery) -> None:
    late = VALIDATE.replace("step % 10 == 9", "step == 30").replace("MODE", "model.eval()").replace("AFTER", "pass")
    run = watch(START, DROPOUT, LOOP + late)
    assert run.causes == ["model.eval-mode-training"]
    again = watch(START, DROPOUT, LOOP + late.replace("pass", "model.train()"))
    assert again.causes == []


PART_IN_EVAL_MODE = """
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    def forward(self, x):
        self.body.eval()
        return self.body(x)
model = Wrapped()
LOADED
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def test_a_part_of_a_new_model_that_is_always_in_eval_mode_is_named(watch: Nursery) -> None:
    run = watch(START, PART_IN_EVAL_MODE.replace("LOADED", ""), LOOP)
    found = run.names_first(
        "model.eval-mode-training", step=0, at="|loss = loss_of", evidence={"passes", "dropouts", "batchnorms"}
    )
    assert (found.evidence["dropouts"], found.evidence["batchnorms"]) == (1, 1)
    loaded = "model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})"
    assert "model.eval-mode-training" not in watch(START, PART_IN_EVAL_MODE.replace("LOADED", loaded), LOOP).causes


def test_modes_switched_around_an_evaluation_are_fine(watch: Nursery) -> None:
    assert watch(START, DROPOUT, validating("model.eval()", "model.train()")).causes == []


def test_eval_mode_of_a_model_without_dropout_or_batch_norm_means_nothing(watch: Nursery) -> None:
    assert watch(START, NET, validating("model.eval()")).causes == []


def test_an_evaluation_in_training_mode_is_named(watch: Nursery) -> None:
    run = watch(START, DROPOUT, validating("pass"))
    found = run.names_first(
        "model.train-mode-eval",
        step=run.facts["evaluations"][0]["step"],
        at="|accuracy =",
        evidence={"passes", "in_training_mode", "dropouts", "batchnorms"},
    )
    assert found.severity == "warning"
    assert run.diagnosis.verdict == "unstable"


def test_an_evaluation_in_training_mode_is_named_where_every_step_clamps_weights_without_gradients(
    watch: Nursery,
) -> None:
    clamp = "    optimizer.step()\n    with torch.no_grad(): model[0].weight.clamp_(-1, 1)\n"
    run = watch(START, DROPOUT, validating("pass").replace("    optimizer.step()\n", clamp))
    assert run.first.cause == "model.train-mode-eval"
    assert run.facts["evaluation_blocks"] < 0.5 * run.facts["steps"]


def test_an_ensemble_of_dropout_masks_is_no_mistake(watch: Nursery) -> None:
    several = "            for _ in range(5): spread = model(x)\n"
    loop = validating("pass").replace("            accuracy = (model(x).argmax(1) == y).float().mean()\n", several)
    assert watch(START, DROPOUT, loop).causes == []


GRAPH = """
edges = torch.eye(256).to_sparse()
inputs = x.to_sparse()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(0.3 * torch.randn(8, 32))
        self.second = nn.Parameter(0.3 * torch.randn(32, 3))
    def forward(self, inputs):
        hidden = F.relu(edges @ (inputs @ self.first))
        return F.log_softmax(edges @ (F.dropout(hidden, 0.3, self.training) @ self.second), 1)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    model.train()
    optimizer.zero_grad()
    loss = F.nll_loss(model(inputs)[:200], y[:200])
    loss.backward()
    optimizer.step()
    MODE
    print(F.nll_loss(model(inputs)[200:], y[200:]).item())
"""
"""Nodes of one graph: every step trains on some and evaluates others, with the same sparse inputs."""


@pytest.mark.parametrize(
    ("mode", "begin", "causes"),
    [
        ("model.eval()", "", []),
        ("model.eval()", "with torch.no_grad(): ", []),
        ("pass", "", ["model.train-mode-eval"]),
        ("pass", "with torch.no_grad(): ", ["eval.random-eval"]),  # the dropout is a function, no module
    ],
)
def test_a_validation_loss_at_every_step_has_a_mode(watch: Nursery, mode: str, begin: str, causes: list[str]) -> None:
    assert watch(START, GRAPH.replace("MODE", mode).replace("print", f"{begin}print")).causes == causes


FUNCTIONAL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, given):
        return self.second(F.dropout(self.first(given).relu(), 0.3, training=self.training))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""
EVALUATED = LOOP.replace("    rows =", "    MODE\n    rows =") + "    model.eval()\n    model(x[:32])\n"


def test_functional_dropout_that_an_evaluation_has_switched_off_for_good_is_named(watch: Nursery) -> None:
    left = watch(CLASSES, "loss_of = F.cross_entropy", FUNCTIONAL, EVALUATED.replace("MODE", "pass"))
    found = left.first
    assert found.cause == "model.eval-mode-training"
    assert left.at("|F.dropout") in found.where
    fine = watch(CLASSES, "loss_of = F.cross_entropy", FUNCTIONAL, EVALUATED.replace("MODE", "model.train()"))
    assert fine.causes == []


def test_an_evaluation_in_training_mode_is_named_where_two_models_are_trained_side_by_side(watch: Nursery) -> None:
    second = """
    other = nn.Linear(8, 3)
    of_other = torch.optim.Adam(other.parameters(), lr=1e-2)
    """
    both = """
    of_other.zero_grad()
    F.cross_entropy(other(x[rows]), y[rows]).backward()
    of_other.step()
"""
    loop = LOOP + both + VALIDATE.replace("MODE", "pass").replace("AFTER", "pass")
    assert watch(START, DROPOUT, second, loop).causes == ["model.train-mode-eval"]


def test_an_evaluation_with_gradients_inside_the_loop_is_no_training_step(watch: Nursery) -> None:
    loop = LOOP.replace("    optimizer.zero_grad()\n", "    model.train()\n    optimizer.zero_grad()\n")
    loop = loop.replace("range(60)", "range(36)")  # the step after the last one would be sampled
    evaluate = """
    if step % 3 == 0:
        model.eval()
        held_out = F.cross_entropy(model(x[:64]), y[:64]).item()
model.eval()
for start in range(0, 256, 8):
    right = model(x[start:start + 8]).argmax(1) == y[start:start + 8]
"""
    assert "model.eval-mode-training" not in watch(START, DROPOUT, loop + evaluate).causes
