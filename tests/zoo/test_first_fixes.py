"""The first fix of a finding, applied to the zoo script as it is written, cures the script.

For causes whose first fix is a change of one or two lines. Causes that need other data, another model or a search (a
learning rate, a weight of a term) are not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import surefoot.zoo

if TYPE_CHECKING:
    from watched import Nursery

TUNING = Path(surefoot.zoo.__file__).parent / "tuning"


class Fix(NamedTuple):
    """A script, the words of its first fix, and the change that they ask for."""

    script: str
    words: str
    old: str
    new: str


FIXES = [
    Fix(
        "loss.softmax-before-cross-entropy/digits_mlp.py",
        "remove the softmax",
        "return self.softmax(self.output(x))",
        "return self.output(x)",
    ),
    Fix("loss.sigmoid-before-bce-logits/tumour_binary.py", "remove the sigmoid", "            nn.Sigmoid(),\n", ""),
    Fix(
        "loss.broadcast/diabetes_mlp.py",
        "`.squeeze(-1)`",
        "criterion(model(xb), yb)",
        "criterion(model(xb).squeeze(-1), yb)",
    ),
    Fix(
        "loss.bounded-output/diabetes_sigmoid.py",
        "Remove the sigmoid",
        "torch.sigmoid(self.outer(torch.tanh(self.inner(x))))",
        "self.outer(torch.tanh(self.inner(x)))",
    ),
    Fix(
        "loss.logits-into-probability-loss/iris_nll.py",
        "log_softmax before nll_loss",
        "return self.fc3(x)",
        "return F.log_softmax(self.fc3(x), dim=1)",
    ),
    Fix("loss.sum-reduction/digits_cnn.py", "Use the mean", 'reduction="sum"', 'reduction="mean"'),
    Fix(
        "loss.sign-flipped/ring_generator.py",
        "use the label of real samples",
        "loss_fn(discriminator(fake), is_fake)",
        "loss_fn(discriminator(fake), is_real)",
    ),
    Fix(
        "optim.missing-zero-grad/digits_mlp.py",
        "zero_grad",
        "        loss.backward()",
        "        optimizer.zero_grad()\n        loss.backward()",
    ),
    Fix(
        "optim.no-update/digits_conv.py",
        "zero_grad",
        "        opt.zero_grad()\n        opt.step()",
        "        opt.step()\n        opt.zero_grad()",
    ),
    Fix(
        "optim.parameters-missing/movie_ratings.py",
        "optimizer",
        "params = list(scorer.parameters())",
        "params = [*scorer.parameters(), *user_table.parameters(), *item_table.parameters()]",
    ),
    Fix("optim.detached-graph/reverse_seq2seq.py", "Remove the cut", "return state.detach()", "return state"),
    Fix(
        "model.eval-mode-training/noisy_blobs.py",
        "train()",
        "        loss = criterion(model(train_x[rows]), train_y[rows])",
        "        model.train()\n        loss = criterion(model(train_x[rows]), train_y[rows])",
    ),
    Fix(
        "model.train-mode-eval/digits_dropout.py",
        "eval()",
        "    correct, loss = 0, 0.0",
        "    model.eval()\n    correct, loss = 0, 0.0",
    ),
    Fix(
        "data.unshuffled/digits_by_class.py",
        "`shuffle=True`",
        "digits.target[pick]), batch_size=32)",
        "digits.target[pick]), batch_size=32, shuffle=True)",
    ),
    Fix("data.leakage/claims_table.py", "Remove column 3", "[age, mileage, city, paid]", "[age, mileage, city]"),
    Fix(
        "data.unscaled-target/house_values.py",
        "Standardise the targets",
        "\nmodel = ",
        "prices = (prices - prices[:600].mean()) / prices[:600].std()\n\nmodel = ",
    ),
    Fix(
        "accum.not-divided/digits_accumulate.py",
        "ivide",
        "loss = criterion(model(inputs), labels)",
        "loss = criterion(model(inputs), labels) / accumulation_steps",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("fix", FIXES, ids=[fix.script for fix in FIXES])
def test_the_first_fix_cures_the_script(watch: Nursery, fix: Fix) -> None:
    cause, source = fix.script.split("/")[0], (TUNING / fix.script).read_text()
    faulty = watch.given(["100"], source)
    assert faulty.first.cause == cause
    assert fix.words in faulty.first.fixes[0]
    assert source.count(fix.old) == 1
    cured = watch.given(["100"], source.replace(fix.old, fix.new))
    assert cured.exit_code == 0, cured.errors
    assert cured.causes == []
