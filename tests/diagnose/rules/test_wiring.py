"""What is connected to what, on real scripts; and wirings that are unusual on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from recorded import SITE, falling, look, optimizer, parameter, run
from surefoot.diagnose.rules import wiring
from surefoot.record.facts import GraphBreak
from watched import CLASSES, FIT, LOOP, NET, VALUES

if TYPE_CHECKING:
    from watched import Nursery

START = CLASSES + "loss_of = F.cross_entropy\n"


# Gradients that are left, or gone


def test_gradients_never_cleared_are_named(watch: Nursery) -> None:
    run = watch(START, NET, LOOP.replace("    optimizer.zero_grad()\n", ""))
    found = run.names_first(
        "optim.missing-zero-grad", step=1, at="|loss.backward", evidence={"share_left", "steps_looked_at", "norms"}
    )
    assert run.at("torch.optim.Adam") in found.where
    assert found.evidence["share_left"] == 1


def test_old_gradients_that_only_become_more_were_never_cleared() -> None:
    def left(*shares: float) -> Any:
        losses = falling(len(shares) + 1)
        held = optimizer(losses)
        held["series"]["leftover"] = [None, *shares]
        return wiring.missing_zero_grad(run(losses, optimizers=[held]))

    assert left(0.02, 0.23, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) is not None  # layers that begin at 0 have no gradient
    assert left(0.0, 0.23, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) is None
    assert left(0.02, 0.23, 0.1, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0) is None
    assert left(0.02, 0.23, 0.3, 0.3, 0.4) is None


def test_old_gradients_in_most_steps_from_the_first_on_are_enough() -> None:
    def left(*shares: float) -> Any:
        losses = falling(len(shares) + 1)
        held = optimizer(losses)
        held["series"]["leftover"] = [None, *shares]
        return wiring.missing_zero_grad(run(losses, optimizers=[held]))

    assert left(*[1.0] * 12, 0.4, 0.0, 0.2, 0.0, 0.0) is not None  # units that died of them have a gradient of 0
    assert left(*[1.0] * 6, 0.4, 0.0, 0.2, 0.0) is None
    assert left(*[1.0] * 8, *[0.0] * 10) is None


def test_gradients_never_cleared_in_a_loop_without_an_optimizer_are_named(watch: Nursery) -> None:
    run = watch(
        VALUES,
        """
        weight = torch.zeros(8, 1, requires_grad=True)
        for step in range(40):
            loss = ((x @ weight - y) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
        """,
    )
    run.names_first("optim.missing-zero-grad", step=1, at="|loss.backward", evidence={"share_left", "norms"})


CLEARED = {
    "after the step": (NET, LOOP.replace("    optimizer.zero_grad()\n", "") + "    optimizer.zero_grad()\n"),
    "by the model": (NET, LOOP.replace("optimizer.zero_grad()", "model.zero_grad()")),
    "to zeros": (NET, LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)")),
    "by hand": (
        NET,
        LOOP.replace("    optimizer.zero_grad()\n", "    for weight in model.parameters(): weight.grad = None\n"),
    ),
    "every fourth step, with the loss divided": (
        NET,
        """
        for step in range(120):
            rows = torch.randint(len(x), (32,))
            loss = loss_of(model(x[rows]), y[rows]) / 4
            loss.backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
}


@pytest.mark.parametrize("name", CLEARED)
def test_gradients_cleared_are_fine(watch: Nursery, name: str) -> None:
    assert watch(START, *CLEARED[name]).causes == []


def test_gradients_of_a_model_that_a_backward_does_not_reach_may_stay(watch: Nursery) -> None:
    """Each optimizer clears its own gradients right before its own backward; the first steps far more often."""
    run = watch(
        START,
        """
        first, second = (nn.Linear(8, 3) for _ in range(2))
        often, seldom = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (first, second))
        for step in range(160):
            rows = torch.randint(len(x), (32,))
            model, optimizer = (second, seldom) if step % 16 == 15 else (first, often)
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    )
    assert "optim.missing-zero-grad" not in run.causes
    left = [v for each in run.facts["optimizers"] for v in each["series"].get("leftover", []) if v is not None]
    assert left
    assert set(left) == {0.0}


def test_a_loop_without_an_optimizer_that_clears_its_gradients_is_fine(watch: Nursery) -> None:
    run = watch(
        VALUES,
        """
        weight = torch.zeros(8, 1, requires_grad=True)
        for step in range(40):
            loss = ((x @ weight - y) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
                weight.grad.zero_()
        """,
    )
    assert run.causes == []


NOTHING_HAPPENS = {
    "never stepped": (NET, LOOP.replace("    optimizer.step()\n", ""), "|torch.optim.Adam", {"backwards", "steps"}),
    "cleared before the step": (
        NET,
        LOOP.replace("    optimizer.zero_grad()\n", "").replace(
            "    optimizer.step()\n", "    optimizer.zero_grad()\n    optimizer.step()\n"
        ),
        "|optimizer.zero_grad",
        {"zeroed_before_step", "steps"},
    ),
    "the optimizer of another model": (
        NET + "model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))\n",
        LOOP,
        "|torch.optim.Adam",
        {"parameters", "share"},
    ),
}


@pytest.mark.parametrize("name", NOTHING_HAPPENS)
def test_steps_that_change_nothing_are_named(watch: Nursery, name: str) -> None:
    model, loop, at, evidence = NOTHING_HAPPENS[name]
    cause = "optim.parameters-missing" if name.startswith("the optimizer") else "optim.no-update"
    watch(START, model, loop).names_first(cause, step=0, at=at, evidence=evidence)


def test_steps_without_any_backward_are_no_work_of_a_detached_copy(watch: Nursery) -> None:
    loop = LOOP.replace("    loss.backward()\n", "    kept = [p.detach() for p in model.parameters()]\n")
    copies = "\n    with torch.no_grad(): torch._foreach_lerp_(average, kept, 0.1)\n"
    run = watch(START, NET, "average = [p.detach().clone() for p in model.parameters()]", loop + copies)
    found = run.names_first("optim.no-update", step=0, at="|torch.optim.Adam", evidence={"steps", "parameters"})
    assert "no `backward` was called" in found.summary
    assert "optim.detached-graph" not in run.causes


def test_a_part_that_is_cut_off_is_named_where_autograd_grad_takes_the_gradients(watch: Nursery) -> None:
    model = NET.replace(
        "model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))",
        "body, head = nn.Linear(8, 32), nn.Linear(32, 3)\nparts = nn.ModuleList([body, head])",
    ).replace("model.parameters()", "parts.parameters()")
    loop = LOOP.replace("model(x[rows])", "head(body(x[rows]).relu().detach())").replace(
        "    loss.backward()\n",
        "    for weight, grad in zip(head.parameters(), torch.autograd.grad(loss, list(head.parameters()))):\n"
        "        weight.grad = grad\n",
    )
    assert watch(START, model, loop).first.cause == "optim.detached-graph"


SOMETHING_HAPPENS = {
    "updates by hand beside an optimizer that is only made": LOOP.replace(
        "    optimizer.step()\n",
        "    with torch.no_grad():\n        for weight in model.parameters(): weight -= 0.3 * weight.grad\n",
    ),
    "a warm-up that begins at zero": "from torch.optim.lr_scheduler import LambdaLR\n"
    + "warm = LambdaLR(optimizer, lambda step: min(1, step / 10))"
    + LOOP
    + "    warm.step()\n",
    "gradients by torch.autograd.grad": LOOP.replace(
        "    loss.backward()\n",
        "    grads = torch.autograd.grad(loss, list(model.parameters()))\n"
        "    for weight, grad in zip(model.parameters(), grads): weight.grad = grad\n",
    ),
}


@pytest.mark.parametrize("name", SOMETHING_HAPPENS)
def test_updates_that_come_about_in_another_way_are_fine(watch: Nursery, name: str) -> None:
    assert watch(START, NET, SOMETHING_HAPPENS[name]).causes == []


# Parameters and optimizers


def test_a_body_that_no_optimizer_was_given_is_named(watch: Nursery) -> None:
    run = watch(START, NET.replace("model.parameters()", "model[2].parameters()"), LOOP)
    found = run.names_first(
        "optim.parameters-missing", step=0, at="|torch.optim.Adam", evidence={"parameters", "share", "optimizer"}
    )
    assert found.evidence["parameters"] == ["0.weight", "0.bias"]
    assert {"0.weight", "0.bias"} <= set(found.where)


LEFT_OUT_ON_PURPOSE = {
    "frozen": "model[0].requires_grad_(False)\noptimizer = torch.optim.Adam(model[2].parameters(), lr=3e-2)\n" + LOOP,
    "a second optimizer": "second = torch.optim.SGD(model[0].parameters(), lr=0.1)\n"
    "optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-2)\n" + LOOP + "    second.step(); second.zero_grad()\n",
    "a temperature moved by hand": "model.register_parameter('heat', nn.Parameter(torch.ones(())))\n"
    "optimizer = torch.optim.Adam([*model[0].parameters(), *model[2].parameters()], lr=1e-2)\n"
    + LOOP.replace("model(x[rows])", "model(x[rows]) * model.heat")
    + "    model.heat.data.mul_(0.99); model.heat.grad = None\n",
}


@pytest.mark.parametrize("name", LEFT_OUT_ON_PURPOSE)
def test_parameters_left_out_on_purpose_are_fine(watch: Nursery, name: str) -> None:
    assert watch(START, NET, LEFT_OUT_ON_PURPOSE[name]).causes == []


def test_a_generator_whose_gradient_passes_through_the_discriminator_is_fine(watch: Nursery) -> None:
    run = watch(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
        of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
        ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
        for step in range(60):
            real, made = torch.randn(32, 2) * 0.5 + 1, maker(torch.randn(32, 4))
            of_judge.zero_grad()
            wrong = F.binary_cross_entropy_with_logits(judge(real), ones)
            wrong = wrong + F.binary_cross_entropy_with_logits(judge(made.detach()), zeros)
            wrong.backward()
            of_judge.step()
            of_maker.zero_grad()
            F.binary_cross_entropy_with_logits(judge(made), ones).backward()
            of_maker.step()
        """
    )
    assert run.causes == []


FREEZE = "model[0].requires_grad_(False)\n"


def test_frozen_weights_that_the_optimizer_was_given_are_named(watch: Nursery) -> None:
    narrow = NET.replace("(8, 32)", "(8, 4)").replace("(32, 3)", "(4, 3)").replace("1e-2", "1e-3")
    run = watch(START, narrow, FREEZE, LOOP)
    found = run.names_first(
        "optim.frozen-parameters", step=0, at="|torch.optim.Adam", evidence={"share", "frozen", "drop"}
    )
    assert found.evidence["frozen"] == ["0.weight", "0.bias"]


def test_frozen_random_features_whose_head_learns_are_only_remarked_on(watch: Nursery) -> None:
    wide = NET.replace("(8, 32)", "(8, 128)").replace("(32, 3)", "(128, 3)").replace("1e-2", "3e-2")
    run = watch(START, wide, FREEZE, LOOP)
    assert run.causes == []
    assert run.finding("optim.frozen-parameters").severity == "info"


def test_a_body_trained_first_and_then_frozen_is_fine(watch: Nursery) -> None:
    second = "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)"
    assert watch(START, NET, LOOP, FREEZE, second, LOOP).causes == []


def test_a_loaded_body_that_is_frozen_is_fine(watch: Nursery) -> None:
    load = "model.load_state_dict(model.state_dict())"
    narrow = NET.replace("(8, 32)", "(8, 4)").replace("(32, 3)", "(4, 3)").replace("1e-2", "1e-3")
    assert "optim.frozen-parameters" not in watch(START, narrow, load, FREEZE, LOOP).causes


BODY_AND_HEAD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))
        self.head = nn.Linear(2, 3)

    def forward(self, given):
        return self.head(self.body(given))

model = Net()
READ
model.body.requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
"""
BY_ASSIGNMENT = """
learned = {name: value + 0.3 * torch.randn_like(value) for name, value in model.body.state_dict().items()}
for name, value in learned.items():
    path, _, own = name.rpartition(".")
    setattr(model.body.get_submodule(path), own, nn.Parameter(value))
"""
BY_A_LIBRARY = """
import os, sys
os.makedirs("site-packages/models", exist_ok=True)
with open("site-packages/models/__init__.py", "w") as file:
    file.write("def read(model):\\n    model.load_state_dict(model.state_dict())\\n")
sys.path.insert(0, "site-packages")
import models
models.read(model.body)
"""


@pytest.mark.parametrize("read", [BY_ASSIGNMENT, BY_A_LIBRARY])
def test_a_body_that_a_library_read_from_a_file_is_frozen_on_purpose(watch: Nursery, read: str) -> None:
    found = watch(START, BODY_AND_HEAD.replace("READ", read), LOOP)
    assert "optim.frozen-parameters" not in [each.cause for each in found.diagnosis.findings]


def test_a_body_with_norms_that_was_never_trained_is_named(watch: Nursery) -> None:
    assert "optim.frozen-parameters" in watch(START, BODY_AND_HEAD.replace("READ", ""), LOOP).causes


# The graph

DETACHED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, given):
        hidden = F.relu(self.inner(given))
        hidden = CUT
        return self.outer(hidden)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


@pytest.mark.parametrize("cut", ["hidden.detach()", "torch.tensor(hidden.tolist())"])
def test_a_cut_graph_is_named_with_the_line_of_the_cut(watch: Nursery, cut: str) -> None:
    run = watch(START, DETACHED.replace("CUT", cut), LOOP)
    found = run.names_first(
        "optim.detached-graph", step=0, at="|hidden = " + cut, evidence={"parameters", "cut", "share"}
    )
    assert found.evidence["parameters"] == ["inner.weight", "inner.bias"]


def test_a_copy_of_the_weights_cuts_no_layer_off_that_the_model_never_calls(watch: Nursery) -> None:
    unused = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layers = nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

        def forward(self, given):
            return self.layers(given)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    """
    run = watch(
        START, unused, LOOP + "    best = {name: value.clone() for name, value in model.state_dict().items()}\n"
    )
    assert run.causes == []


@pytest.mark.parametrize("weight", ["self.outer.weight.detach()", "self.outer.weight.data"])
def test_a_weight_that_is_detached_for_the_forward_pass_is_named(watch: Nursery, weight: str) -> None:
    used = DETACHED.replace("CUT", "hidden").replace(
        "self.outer(hidden)", f"F.linear(hidden, {weight}, self.outer.bias)"
    )
    found = watch(START, used, LOOP).finding("optim.detached-graph")
    assert found.evidence["parameters"] == ["outer.weight"]


@pytest.mark.parametrize(("op", "words"), [("detach", "`detach`"), ("no_grad", "running without gradients (no_grad)")])
def test_a_cut_is_named_in_words_with_its_line(op: str, words: str) -> None:
    cut = GraphBreak(op=op, site=SITE, module="", reaches_loss=True, backward_calls=[0], parameters=[0])
    assert wiring.words_of_cut(cut) == f"{words} at {SITE}"
    assert SITE in wiring.fix_of_cut(cut)


def test_a_backward_that_crashes_on_a_cut_graph_names_the_cut(watch: Nursery) -> None:
    run = watch(START, NET, LOOP.replace("loss.backward()", "loss = loss.detach() * 2\n    loss.backward()"))
    assert run.exit_code == 1
    found = run.names_first("optim.detached-graph", step=0, at="|loss.backward()", evidence={"message", "cuts"})
    assert run.at("loss.detach()") in found.where


ADVERSARIES = """
maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
judge = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
of_maker, of_judge = torch.optim.Adam(maker.parameters(), 1e-3), torch.optim.Adam(judge.parameters(), 1e-3)
bce, ones = F.binary_cross_entropy_with_logits, torch.ones(32, 1)
"""
TURNS = {
    "the judge first": """
        for step in range(40):
            made = maker(torch.randn(32, 4))
            of_judge.zero_grad()
            (bce(judge(torch.randn(32, 2)), ones) + bce(judge(made.detach()), 0 * ones)).backward()
            of_judge.step()
            seen = made.detach()  # FAULT
            of_maker.zero_grad()
            bce(judge(seen), ones).backward()
            of_maker.step()
        """,
    "the maker first, the judge twice": """
        for step in range(40):
            seen = maker(torch.randn(32, 4)).data  # FAULT
            of_maker.zero_grad()
            bce(judge(seen), ones).backward()
            of_maker.step()
            for _ in range(2):
                made = maker(torch.randn(32, 4)).detach()
                of_judge.zero_grad()
                (bce(judge(torch.randn(32, 2)), ones) + bce(judge(made), 0 * ones)).backward()
                of_judge.step()
        """,
    "both backwards, then both steps": """
        for step in range(40):
            made = maker(torch.randn(32, 4))
            of_judge.zero_grad(); of_maker.zero_grad()
            (bce(judge(torch.randn(32, 2)), ones) + bce(judge(made.detach()), 0 * ones)).backward()
            seen = made.detach()  # FAULT
            bce(judge(seen), ones).backward()
            of_judge.step(); of_maker.step()
        """,
}


@pytest.mark.parametrize("turns", TURNS)
def test_the_cut_is_that_of_the_loss_the_parameters_are_trained_for(watch: Nursery, turns: str) -> None:
    run = watch(START, ADVERSARIES, TURNS[turns])
    found = run.names_first("optim.detached-graph", step=0, at="|# FAULT", evidence={"parameters", "cut", "share"})
    assert found.evidence["parameters"][0] == "maker.0.weight"
    missing = [row for look in run.facts["sampled_steps"] for step in look["steps"] for row in step["rows"]
               if step["optimizer"] == 0]  # fmt: skip
    assert missing
    assert all(row["grad"] is None for row in missing)


def test_a_loss_of_rounded_values_is_named_with_the_line_that_rounds(watch: Nursery) -> None:
    run = watch(START, DETACHED.replace("CUT", "hidden"), LOOP.replace("model(x[rows])", "model(x[rows]).round()"))
    found = run.names_first("optim.detached-graph", step=0, at="|.round()", evidence={"cut", "share", "sampled_steps"})
    assert found.evidence["share"] == 1.0
    assert "`round`" in found.summary
    assert "`round`" in found.fixes[0]


def test_a_loss_copied_into_a_new_tensor_that_requires_a_gradient_is_named(watch: Nursery) -> None:
    copied = LOOP.replace(
        "    loss.backward", "    loss = torch.tensor([loss], requires_grad=True).mean()\n    loss.backward"
    )
    run = watch(START, DETACHED.replace("CUT", "hidden"), copied)
    found = run.names_first("optim.detached-graph", step=0, at="|torch.tensor([loss]", evidence={"cut"})
    assert found.evidence["cut"]["op"] == "tensor"
    assert "optim.no-update" not in run.causes


STOPPED_ON_PURPOSE = {
    "a target from a slow copy": """
        import copy
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        slow = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(60):
            rows = torch.randint(len(x), (32,))
            optimizer.zero_grad()
            scores = model(x[rows])
            with torch.no_grad():
                wanted = slow(x[rows]).softmax(-1)
                for mine, other in zip(slow.parameters(), model.parameters()): mine.lerp_(other, 0.01)
            loss = F.cross_entropy(scores, y[rows]) + 0.1 * F.cross_entropy(scores, wanted)
            loss.backward()
            optimizer.step()
        """,
    "an accuracy kept beside the loss": NET
    + LOOP
    + "    right = (model(x[rows]).detach().argmax(1) == y[rows]).float()\n",
    "a straight-through estimator": DETACHED.replace("CUT", "hidden + (hidden.round() - hidden).detach()") + LOOP,
}


@pytest.mark.parametrize("name", STOPPED_ON_PURPOSE)
def test_gradients_stopped_on_purpose_are_fine(watch: Nursery, name: str) -> None:
    assert watch(START, STOPPED_ON_PURPOSE[name]).causes == []


IN_A_LIST = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 32), nn.Linear(32, 32)]
        self.head = nn.Linear(32, 3)

    def forward(self, given):
        for layer in self.layers:
            given = F.relu(layer(given))
        return self.head(given)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def test_layers_in_a_plain_list_are_named(watch: Nursery) -> None:
    run = watch(START, IN_A_LIST, LOOP)
    found = run.names_first(
        "model.unregistered-parameters", step=0, at="|torch.optim.Adam", evidence={"tensors", "weights"}
    )
    assert found.evidence["weights"] == 8 * 32 + 32 + 32 * 32 + 32
    assert found.evidence["tensors"][0] == "layers[0].weight"


def test_layers_in_a_plain_list_that_the_optimizer_was_given_are_fine(watch: Nursery) -> None:
    given = "model.parameters(), lr=1e-2"
    whole = "[*model.parameters(), *(w for layer in model.layers for w in layer.parameters())], lr=1e-2"
    run = watch(START, IN_A_LIST.replace(given, whole), LOOP)
    assert run.causes == []


def test_a_regression_wired_plainly_is_healthy(watch: Nursery) -> None:
    assert watch(VALUES, "loss_of = F.mse_loss", FIT, LOOP).causes == []


BY_HAND = """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
for step in range(60):
    MODE
    if step % 10 == 5:
        with torch.no_grad():
            F.cross_entropy(model(x[200:]), y[200:]).item()
    model.train()
    rows = torch.randint(200, (32,))
    loss = F.cross_entropy(model(x[rows]), y[rows])
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.data -= RATE * p.grad
"""
"""The loop of lectures: the update is written out."""


@pytest.mark.parametrize(
    ("mode", "rate", "causes"),
    [
        ("model.eval()", "0.3", []),
        ("pass", "0.3", ["model.train-mode-eval"]),
        ("model.eval()", "300.0", ["lr.too-high"]),
        ("model.eval()", "1e-6", ["lr.too-low"]),
    ],
)
def test_loops_without_an_optimizer_are_judged_like_others(
    watch: Nursery, mode: str, rate: str, causes: list[str]
) -> None:
    run = watch(START, BY_HAND.replace("MODE", mode).replace("RATE", rate))
    assert run.causes[:1] == causes
    assert run.diagnosis.verdict == ("broken" if "lr" in "".join(causes) else "unstable" if causes else "healthy")


def test_gradients_that_the_backward_of_another_optimizer_leaves_need_not_be_cleared() -> None:
    """A generator that steps ten times for each step of the discriminator, through which its gradient passes."""
    left = optimizer(falling(20), 1)
    left["series"]["leftover"] = [None] + [1.0] * 19
    facts = {"optimizers": [optimizer(falling(200), 0), left], "parameters": [parameter(0), parameter(1, "D", (1,))]}

    def looks(stepped: int) -> list[dict[str, Any]]:
        root = {"parameters": [0, 1], "value": 1.0, "site": SITE, "for": [stepped]}
        return [look(step, roots=[root]) for step in range(8)]

    assert wiring.missing_zero_grad(run(falling(200), **facts, sampled_steps=looks(stepped=0))) is None
    assert wiring.missing_zero_grad(run(falling(200), **facts, sampled_steps=looks(stepped=1))) is not None


def bare(number: int, optimizers: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return parameter(number, "", optimizers) | {"name": "", "registered": True, "in_graph": 8} | more


def test_a_tensor_without_a_module_that_no_optimizer_was_given_is_named() -> None:
    looks = [look(step) for step in range(8)]
    lost = run(parameters=[bare(0, (0,)), bare(1, (), moves=[0.0] * 8)], sampled_steps=looks)
    claim = wiring.parameters_missing(lost)
    assert claim is not None
    assert claim.evidence["share"] == 0.5
    by_hand = run(parameters=[bare(0, (0,)), bare(1, (), moves=[0.01] * 8, moved_alone=8)], sampled_steps=looks)
    assert wiring.parameters_missing(by_hand) is None
    other = run(parameters=[bare(0, (0,)), bare(1, (), in_graph=1, moves=[0.0])], sampled_steps=looks)
    assert wiring.parameters_missing(other) is None, "a leaf of one step only, such as an input with a gradient"


def test_a_compiled_model_whose_weights_never_get_a_gradient_is_cut_inside() -> None:
    seen = {"in_graph": 20, "sampled": 20}
    body, head = seen | {"with_grad": 0, "changed": 0}, seen | {"with_grad": 20, "changed": 20}
    parts = [parameter(0) | body, parameter(1) | head]
    claim = wiring.detached_graph(run(parameters=parts, compiled=True))
    assert claim is not None
    assert claim.evidence["parameters"] == ["model.0.weight"]
    assert wiring.detached_graph(run(parameters=[parts[1], parts[1] | {"id": 2}], compiled=True)) is None


CUT_TERM = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8)
y = x[:, :3].argmax(1)
model = nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    label = F.cross_entropy(model(x)CUT, y)
    size = model(x + 0.1 * torch.randn_like(x)).square().mean()
    optimizer.zero_grad()
    LOSS.backward()
    optimizer.step()
"""


def test_a_term_of_the_loss_that_is_cut_off_is_named(watch: Nursery) -> None:
    run = watch(CUT_TERM.replace("CUT", ".data").replace("LOSS", "(label + 0.1 * size)"))
    run.names_first("optim.detached-graph", step=0, at="|label = F.cross_entropy", evidence={"cut", "loss", "last"})
    only_logged = CUT_TERM.replace("CUT", ".data").replace("LOSS", "size")
    assert "optim.detached-graph" not in watch(only_logged).causes


INNER_LOSS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.table, self.decoder = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x):
        code = self.encoder(x)
        near = self.table(torch.ones_like(code))
        return self.decoder(code), F.mse_loss(near, code.detach())


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    rows = x[torch.randint(200, (32,))]
    output, inner = model(rows)
    loss = F.mse_loss(output, rows) + inner
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        model(x[200:])
    optimizer.step()
"""


def test_a_loss_inside_the_model_is_not_cut_off_because_the_model_is_evaluated_too(watch: Nursery) -> None:
    assert "optim.detached-graph" not in watch(INNER_LOSS).causes


# Layers that the forward pass creates

MADE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)
        self.middle = nn.Linear(32, 32)

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.last(F.relu(MIDDLE))


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def test_a_layer_that_is_created_in_the_forward_pass_is_named(watch: Nursery) -> None:
    run = watch(START, MADE.replace("MIDDLE", "nn.Linear(32, 32)(h)"), LOOP)
    found = run.names_first(
        "model.unregistered-parameters", step=0, at="|nn.Linear(32, 32)(h)", evidence={"layer", "sampled_steps"}
    )
    assert found.evidence["layer"] == "Linear"


NOT_MADE = {
    "a hypernetwork": "F.linear(h, self.middle(self.middle.weight))",
    "random features without gradients": "F.linear(h, torch.randn(32, 32))",
    "a layer of its own": "self.middle(h)",
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_weights_that_are_computed_or_drawn_are_no_layer_that_is_created(watch: Nursery, name: str) -> None:
    run = watch(START, MADE.replace("MIDDLE", NOT_MADE[name]), LOOP)
    assert "model.unregistered-parameters" not in run.causes


def test_a_schedule_that_is_only_plotted_is_no_training(watch: Nursery) -> None:
    plot = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)\nfor step in range(60):\n    optimizer.step()\n"
    run = watch(START, NET, plot + "    schedule.step()\n")
    assert (run.diagnosis.verdict, run.causes) == ("unknown", [])


DECISIONS = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(200, 6)
y = (x[:, :1] > 0).float()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    rows = torch.randint(200, (32,))
    chosen = (torch.sigmoid(model(x[rows])) > 0.5).float().requires_grad_()
    optimizer.zero_grad()
    F.binary_cross_entropy(chosen, y[rows]).backward()
    optimizer.step()
"""


def test_a_comparison_between_the_model_and_the_loss_is_named(watch: Nursery) -> None:
    first = watch(DECISIONS).names_first("optim.detached-graph", step=0, at="|> 0.5", evidence={"cut"})
    assert first.fixes[0].startswith("Pass the values that `gt` gets")


MICROBATCHES = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(400, 6)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    optimizer.zero_grad()
    for part in range(4):
        rows = torch.randint(400, (8,))
        CLEAR
        (F.cross_entropy(model(x[rows]), y[rows]) / 4).backward()
    optimizer.step()
"""


def test_gradients_cleared_between_microbatches_are_named(watch: Nursery) -> None:
    run = watch(MICROBATCHES.replace("CLEAR", "model.zero_grad()"))
    first = run.names_first("optim.lost-microbatch", step=0, at="|model.zero_grad()", evidence={"backwards"})
    assert first.evidence["backwards"] == 4
    assert watch(MICROBATCHES.replace("CLEAR", "pass")).causes == []


def test_gradients_cleared_after_an_attack_are_fine(watch: Nursery) -> None:
    attack = """rows = torch.randint(400, (32,))
    given = x[rows].requires_grad_()
    F.cross_entropy(model(given), y[rows]).backward()
    given = (given + 0.05 * given.grad.sign()).detach()
    optimizer.zero_grad()
    F.cross_entropy(model(given), y[rows]).backward()
    optimizer.step()
"""
    start = MICROBATCHES.index("optimizer.zero_grad()")
    assert watch(MICROBATCHES[:start] + attack).causes == []


def test_gradients_of_the_same_batch_that_are_cleared_in_between_are_fine(watch: Nursery) -> None:
    """As in sharpness-aware minimization, where one function computes both gradients of a step."""
    sharpness_aware = """rows = torch.randint(400, (32,))
    for pass_ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p += (0.01 if pass_ == 0 else -0.01) * p.grad.sign()
    optimizer.step()
"""
    start = MICROBATCHES.index("optimizer.zero_grad()")
    assert watch(MICROBATCHES[:start] + sharpness_aware).causes == []


GATED = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
adapters = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
last = nn.Linear(16, 1)
optimizer = torch.optim.Adam([*adapters.parameters(), *last.parameters()], lr=1e-2)
for step in range(120):
    x, task = torch.randn(64, 8), torch.zeros(64)
    h = sum((task == k).float()[:, None] * adapter(x) for k, adapter in enumerate(adapters))
    optimizer.zero_grad()
    F.mse_loss(last(h.sign() * (h.abs() + 1e-4).sqrt()), x[:, :1]).backward()
    optimizer.step()
"""


def test_a_part_that_no_row_uses_does_not_blame_a_sign_after_it(watch: Nursery) -> None:
    assert "optim.detached-graph" not in watch(GATED).causes


ROW_BY_ROW = (
    MICROBATCHES.replace("CLEAR", "model.zero_grad()")
    .replace(
        "    optimizer.step()",
        """\
        rate = min(1.0, 1 / float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        sums = [PART for s, p in zip(sums, model.parameters())]
    for s, p in zip(sums, model.parameters()):
        PUT
    optimizer.step()""",
    )
    .replace("    for part", "    sums = [torch.zeros_like(p) for p in model.parameters()]\n    for part")
)


@pytest.mark.parametrize("put", ["p.grad = s / 4", "p.grad.copy_(s)", "p.grad = s + 0.1 * torch.randn_like(s)"])
def test_gradients_that_are_clipped_row_by_row_and_added_up_by_hand_are_fine(watch: Nursery, put: str) -> None:
    assert watch(ROW_BY_ROW.replace("PART", "s + rate * p.grad").replace("PUT", put)).causes == []


def test_the_last_microbatch_alone_is_named_if_its_gradient_is_clipped(watch: Nursery) -> None:
    clipped = ROW_BY_ROW.replace("PART", "s").replace("PUT", "p.grad.clamp_(-0.05, 0.05)")
    assert watch(clipped).first.cause == "optim.lost-microbatch"


def test_no_gradient_is_asked_for_a_target_network_that_the_optimizer_was_given_by_mistake(watch: Nursery) -> None:
    run = watch(
        VALUES
        + """
model, target = [nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2)]
optimizer = torch.optim.Adam(target.parameters(), lr=1e-3)
for step in range(60):
    rows = torch.randint(len(x), (32,))
    with torch.no_grad():
        wanted = y[rows] + 0.9 * target(x[rows])
    optimizer.zero_grad()
    F.mse_loss(model(x[rows]), wanted).backward()
    optimizer.step()
"""
    )
    assert run.causes == ["optim.parameters-missing"]


CLAMPED = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = 4 * torch.randn(256, 8)
y = (2 * x[:, :5]).argmax(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
with torch.no_grad():
    model[2].weight *= SCALE
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(100):
    rows = torch.randint(256, (32,))
    p = model(x[rows]).softmax(1)
    mine = p[torch.arange(32), y[rows]]
    hot = F.one_hot(y[rows], 5).float()
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_clamp_that_stops_the_gradient_of_many_rows_is_named(watch: Nursery) -> None:
    run = watch(CLAMPED.replace("SCALE", "30").replace("LOSS", "-torch.log(mine.clamp(min=1e-1)).mean()"))
    found = run.names_first("optim.detached-graph", step=0, at="|mine.clamp", evidence={"share", "bound"})
    assert found.evidence["share"] > 0.4
    assert found.evidence["bound"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "loss",
    [
        "-torch.log(mine.clamp(min=1e-7)).mean()",
        "-torch.log(mine.clamp(1e-7, 1 - 1e-7)).mean()",
        "-torch.log(mine.clamp(max=0.2)).mean() + F.nll_loss(p.log(), y[rows])",
        "-(hot * torch.log(p.clamp(min=1e-2))).sum(1).mean() + F.nll_loss(torch.log(p + 1e-9), y[rows])",
        "-(hot * torch.log(p.clamp(min=1e-5)) + (1 - hot) * torch.log((1 - p).clamp(min=1e-5))).mean()",
        "-torch.log(mine.clamp(min=1e-2)).mean() + F.nll_loss(torch.log(p + 1e-9), y[rows])",
        "F.nll_loss(torch.log(p.clamp(min=1e-6)), y[rows])",
        "-torch.log(mine.mean().clamp_min(1e-7))",
        "-torch.log((mine > 0.01).float().mul(mine + 1).clamp(0.1, 0.9)).mean()",
        "torch.log((p - hot).square().sum(1).clamp(min=0.5)).mean()",
    ],
)
def test_a_clamp_that_only_keeps_the_logarithm_finite_is_fine(watch: Nursery, loss: str) -> None:
    assert "optim.detached-graph" not in watch(CLAMPED.replace("SCALE", "1").replace("LOSS", loss)).causes
