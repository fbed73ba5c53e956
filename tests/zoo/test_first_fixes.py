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
        "model.mixes-rows/digits_flatten.py",
        "`.flatten(1)`",
        "x.permute(1, 0, 2, 3).reshape(x.size(0), -1)",
        "x.flatten(1)",
    ),
    Fix(
        "model.mixes-rows/review_encoder.py",
        "batch_first=True",
        "nn.MultiheadAttention(width, 4)",
        "nn.MultiheadAttention(width, 4, batch_first=True)",
    ),
    Fix(
        "model.mixes-rows/motif_states.py",
        "`.transpose(0, 1)`",
        "states.view(x.size(0), 2 * HIDDEN)",
        "states.transpose(0, 1).reshape(x.size(0), 2 * HIDDEN)",
    ),
    Fix(
        "model.collapsed-embedding/two_views.py",
        "similarity(p1, z2.detach())",
        "similarity(first, code).mean() - similarity(second, other_code).mean()",
        "similarity(first, code.detach()).mean() - similarity(second, other_code.detach()).mean()",
    ),
    Fix("mask.inverted/intent_encoder.py", "pass `ids == 0`", "tokens != PAD", "tokens == PAD"),
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
    Fix("optim.detached-graph/digits_code.py", "Draw with `rsample()`", "q.sample()", "q.rsample()"),
    Fix("optim.detached-graph/star_ratings.py", "the values that `round` gets", "rating.round()", "rating"),
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
    Fix(
        "accum.uneven-microbatches/chunked_regression.py",
        "Sum the loss over each microbatch and divide by the number of targets in the whole window",
        "error.pow(2).mean() / len(pieces)",
        "error.pow(2).sum() / len(batch)",
    ),
    Fix(
        "clip.before-unscale/half_digits.py",
        "`scaler.unscale_(optimizer)` before clipping",
        "        torch.nn.utils.clip_grad_norm_",
        "        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_",
    ),
    Fix("clip.saturated/digits_clipped.py", "Raise max_norm to about 0.9", "GRAD_CLIP = 0.01", "GRAD_CLIP = 0.94"),
    Fix(
        "data.label-out-of-range/wine_csv.py",
        "subtract 1",
        "labels = table[:, 0].long()",
        "labels = table[:, 0].long() - 1",
    ),
    Fix(
        "data.repeated-batches/digits_steps.py",
        "Create the iterator once, before the loop, and call `next` on it; create a new one when it ends",
        "    inputs, targets = next(iter(train_loader))",
        "    if (step - 1) % len(train_loader) == 0:\n        batches = iter(train_loader)\n"
        "    inputs, targets = next(batches)",
    ),
    Fix(
        "data.split-mismatch/digits_pipeline.py",
        "the same preprocessing code for both splits",
        "digits.target[test_idx], [to_tensor])",
        "digits.target[test_idx], [to_tensor, scale])",
    ),
    Fix(
        "data.token-mismatch/docstring_lm.py",
        "Create the embedding with at least",
        "model = WindowLM(vocab_size,",
        "model = WindowLM(len(stoi),",
    ),
    Fix(
        "data.unscaled-input/tumour_sgd.py",
        "Standardise each feature with statistics of the training split",
        "class Net(nn.Module):",
        "features = (features - features[train_rows].mean(0)) / features[train_rows].std(0)\n\n\nclass Net(nn.Module):",
    ),
    Fix(
        "data.worker-seeds/generated_curves.py",
        "`numpy.random` inside `__getitem__`",
        "self.generator = np.random.default_rng(SEED)",
        "self.generator = np.random",
    ),
    Fix(
        "eval.random-eval/digits_functional.py",
        "`training=self.training`",
        "F.dropout(F.relu(self.hidden(x)), p=0.5)",
        "F.dropout(F.relu(self.hidden(x)), p=0.5, training=self.training)",
    ),
    Fix("init.symmetric/two_moons.py", "at random", "        m.weight.data.fill_(0.1)\n", ""),
    Fix(
        "init.too-large/relu_tower.py",
        "`surefoot.init_for(model, overwrite=True)`",
        "\nopt = ",
        "\nimport surefoot\n\nsurefoot.init_for(net, overwrite=True)\nopt = ",
    ),
    Fix(
        "init.too-small/deep_tanh_wine.py",
        "`surefoot.init_for(model, overwrite=True)`",
        "model.apply(init)\n",
        "model.apply(init)\nimport surefoot\n\nsurefoot.init_for(model, overwrite=True)\n",
    ),
    Fix(
        "loss.no-valid-targets/masked_words.py",
        "Skip batches without a valid target",
        "    loss = masked_loss(",
        "    if (labels == -100).all():\n        continue\n    loss = masked_loss(",
    ),
    Fix(
        "loss.padding-counted/reverse_words.py",
        "`ignore_index=0`",
        "nn.CrossEntropyLoss()",
        "nn.CrossEntropyLoss(ignore_index=0)",
    ),
    Fix(
        "loss.target-offset/zen_gpt.py",
        "pass the unshifted ids as labels",
        "loss = model(x, labels=y)",
        "loss = model(x, labels=x)",
    ),
    Fix(
        "loss.undefined-op/shop_choice.py",
        "`.clamp_min(1e-8)`",
        "(p * torch.log(p))",
        "(p * torch.log(p.clamp_min(1e-8)))",
    ),
    Fix(
        "lr.schedule-broken/digits_step_decay.py",
        "`scheduler.step()` once per epoch, after the loop over the batches",
        "        scheduler.step()\n        running += loss.item()\n",
        "        running += loss.item()\n    scheduler.step()\n",
    ),
    Fix("lr.too-high/digits_sgd.py", "0.1 to 0.3", "learning_rate = 1.0", "learning_rate = 0.1"),
    Fix("lr.too-low/diabetes_linear.py", "1e-05 to 0.0001", "lr=1e-6", "lr=1e-4"),
    Fix(
        "mask.fully-masked-row/reviews_attention.py",
        "`surefoot.build.masked_softmax`",
        "        mixed = F.softmax(scores, dim=-1) @ v\n",
        "        import surefoot.build\n\n"
        "        mixed = surefoot.build.masked_softmax(scores, ~pad[:, None, None, :].expand_as(scores)) @ v\n",
    ),
    Fix(
        "mask.leaks-future/char_transformer.py",
        "causal mask (`is_causal=True`)",
        "self.blocks(x))",
        "self.blocks(x, mask=nn.Transformer.generate_square_subsequent_mask(t), is_causal=True))",
    ),
    Fix(
        "memory.graph-retained/digits_history.py",
        "`loss.item()`",
        "history.append(loss)",
        "history.append(loss.item())",
    ),
    Fix(
        "model.batchnorm-tiny-batch/before_after.py",
        "Use larger batches",
        "batch_size=1, shuffle=True)",
        "batch_size=16, shuffle=True)",
    ),
    Fix(
        "model.unregistered-parameters/digits_deep.py",
        "`nn.ModuleList`",
        "        self.head = nn.Linear(width, 10)\n",
        "        self.blocks = nn.ModuleList(self.blocks)\n        self.head = nn.Linear(width, 10)\n",
    ),
    Fix(
        "model.saturated-units/highway_rings.py",
        "a bias near 0",
        "nn.init.constant_(self.gate.bias, -carry)",
        "nn.init.constant_(self.gate.bias, 0.0)",
    ),
    Fix("model.vanishing-gradient/digits_sigmoid.py", "ReLU", "nn.Sigmoid()]", "nn.ReLU()]"),
    Fix("optim.epsilon/digits_autoencoder.py", "the default is 1e-8", "eps=1e-1", "eps=1e-8"),
    Fix(
        "optim.frozen-parameters/review_words.py",
        "Set requires_grad=True on them",
        "model = BagOfWords(vectors)\n",
        "model = BagOfWords(vectors)\nmodel.words.weight.requires_grad = True\n",
    ),
    Fix(
        "optim.not-learning/digits_heavy_dropout.py",
        "Set `p` of this dropout to 0.1",
        "nn.Dropout(0.98), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.98)",
        "nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1)",
    ),
    Fix("optim.weight-decay/digits_scaled.py", "Lower weight_decay to 3e-03", "weight_decay=0.3", "weight_decay=3e-3"),
    Fix(
        "precision.fp16-underflow/image_autoencoder.py",
        "Scale the loss with `GradScaler`",
        "enabled=False",
        "enabled=True",
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
