"""Every cause that surefoot can name: its symptom, its evidence, causes that look similar, and its fixes.

A cause has a code such as `lr.too-high`. Codes are a public contract and are never renamed. The symptom is what a user
sees, the evidence is what distinguishes this cause from similar ones, and the fixes are ordered from one that takes a
minute to one that changes the model. `surefoot explain CODE` and the docs print these texts unchanged.

This module imports only the standard library, so that the command line can use it without torch. The rules that
measure the evidence are in `diagnose/rules/`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FAMILIES = {
    "data": "inputs and labels",
    "loss": "the loss function",
    "mask": "attention masks",
    "init": "initial weights",
    "model": "layers and modes",
    "lr": "learning rate and schedule",
    "optim": "the optimizer and its parameters",
    "eval": "evaluation",
    "clip": "gradient clipping",
    "accum": "gradient accumulation",
    "precision": "mixed and low precision",
    "memory": "memory that is not freed",
    "dist": "several ranks",
    "resume": "restarts",
    "repro": "reproducibility",
    "rl": "policies and rewards",
    "gan": "generators and discriminators",
    "device": "errors of the accelerator",
    "fit": "validation and generalisation",
    "hw": "hardware",
}
"""The first part of a code, and what it covers, in the order of the catalogue."""


@dataclass(frozen=True)
class Cause:
    """One way in which training goes wrong."""

    code: str
    """Family and name, such as `loss.broadcast`; never renamed."""

    title: str
    """The fault, in a few words."""

    symptom: str
    """What a user sees."""

    evidence: str
    """What distinguishes this cause from similar ones."""

    look_alikes: tuple[str, ...]
    """Codes of causes that look similar."""

    fixes: tuple[str, ...]
    """What to change, from fast to invasive."""

    cured_by: Mapping[str, str] = field(default_factory=dict)
    """The changes of `surefoot bisect` that are among the fixes, and the words of the fix that name them."""

    must_cure: tuple[str, ...] = ()
    """Of those, the ones that cure the run if this is its only cause. If one of them leaves the failure at the same
    step, this is evidence against the cause; if the failure comes later, the change may have been too small."""

    @property
    def family(self) -> str:
        """The first part of the code."""
        return self.code.split(".")[0]


def _cause(
    code: str,
    title: str,
    symptom: str,
    evidence: str,
    look_alikes: str,
    *fixes: str,
    cured_by: Mapping[str, str] | None = None,
    must_cure: tuple[str, ...] = (),
) -> Cause:
    return Cause(code, title, symptom, evidence, tuple(look_alikes.split()), fixes, cured_by or {}, must_cure)


_CAUSES = (
    # ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "data.nonfinite-input",
        "NaN or Inf in the data",
        "The loss becomes NaN from one step to the next, on a batch that looks ordinary.",
        "Among the tensors that the loss depends on, the first one with a NaN or an Inf is a model input or a target. "
        "No operation produced it.",
        "loss.undefined-op precision.fp16-overflow lr.too-high mask.fully-masked-row",
        "Find the row, and remove it or fill in its value before batching.",
        "Check the whole data set with `torch.isfinite` once, when it is built.",
        "Skip such steps with `TrainingStabilizer` or `surefoot run --guard`, so that one row costs one step.",
        cured_by={"skip-batch": "Skip such steps"},
    ),
    _cause(
        "data.unscaled-input",
        "inputs far from unit scale",
        "The loss hardly changes, or diverges in the first few steps, with any model.",
        "At step 0, before any update, the mean or spread of the inputs is tens of times larger or smaller than 1, "
        "while learning rate and initial weights are in the usual range.",
        "lr.too-high lr.too-low init.too-large",
        "Standardise each feature with statistics of the training split, for example with `surefoot.Standardizer`.",
        "Divide image bytes by 255, or use `surefoot.build.normalize_images`.",
        "Use a normalisation layer as the first layer, so that the scale no longer matters.",
    ),
    _cause(
        "data.unscaled-target",
        "targets far larger than the predictions",
        "The loss of a regression is huge and falls by a tiny part per epoch; all predictions are far too small.",
        "The targets are tens of times larger than 1 and than the predictions, nearly all of them lie beyond every "
        "prediction, and the loss stays above that of the best constant answer: the output would have to grow by "
        "orders of magnitude, one small update at a time.",
        "lr.too-low data.unscaled-input loss.bounded-output",
        "Standardise the targets with the mean and standard deviation of the training split, and undo it for "
        "predictions.",
        "Predict the logarithm of targets that are positive and spread over orders of magnitude.",
        "Set the bias of the last layer to the mean of the targets.",
    ),
    _cause(
        "data.bad-batch",
        "one bad batch",
        "The loss spikes for one step and recovers. In the next epoch it spikes again at the same position.",
        "Input, target or loss of one batch is far outside the range of all others, and the spike moves with the batch "
        "when the order changes.",
        "lr.too-high hw.silent-corruption model.exploding-gradient",
        "Inspect the rows of that batch, and filter them out.",
        "Clip gradients, so that a single batch cannot move the weights far.",
        "Use a loss that is robust to outliers, such as the Huber loss.",
        cured_by={"skip-batch": "filter them out", "clip": "Clip gradients"},
    ),
    _cause(
        "data.unshuffled",
        "data in sorted order",
        "The loss is a sawtooth: it falls while similar rows follow each other, and jumps when the next kind begins.",
        "Labels within a batch are far less mixed than in the whole data set, or the loss repeats with the period of "
        "an epoch.",
        "data.repeated-batches lr.too-high lr.schedule-broken",
        "Pass `shuffle=True` to the loader.",
        "For streams, shuffle the shards and draw from a shuffle buffer of a few thousand rows.",
        cured_by={"other-batches": "shuffle=True"},
    ),
    _cause(
        "data.repeated-batches",
        "repeated batches",
        "The training loss falls unusually fast, and evaluation does not improve with it.",
        "Fingerprints of batches repeat within one epoch, or occur in exactly the same order in every epoch although "
        "the sampler should shuffle.",
        "data.leakage resume.data-replayed data.unshuffled",
        "Do not reseed inside the epoch loop; call `sampler.set_epoch(epoch)` on a distributed sampler.",
        "Keep one iterator per epoch: `next(iter(loader))` returns the first batch every time.",
        "Remove duplicates from the data set.",
    ),
    _cause(
        "data.label-out-of-range",
        "labels outside the range of the classes",
        "The loss raises an index error (on a GPU, a device-side assert), or is NaN.",
        "Some labels are outside 0 to C-1, where C is the number of outputs, and are not the ignore index.",
        "data.token-mismatch loss.no-valid-targets",
        "Map labels to 0 to C-1, and check their minimum and maximum against the width of the last layer.",
        "If they count from 1, subtract 1; if -1 means unlabelled, pass `ignore_index=-1`.",
        "Add outputs to the last layer if a class was forgotten.",
    ),
    _cause(
        "data.token-mismatch",
        "token ids and embedding disagree",
        "The embedding raises an index error, or the model does not learn anything useful.",
        "Ids exceed the rows of the embedding table, or use only a small part of it: the tokenizer does not belong to "
        "the table.",
        "data.label-out-of-range data.labels-uninformative",
        "Load tokenizer and model from the same source.",
        "Resize the embedding (and the output layer tied to it) after adding tokens.",
        "Tokenise the data again.",
    ),
    _cause(
        "data.labels-uninformative",
        "labels do not belong to the inputs",
        "The loss stays at chance level on the whole data set, and no optimizer setting helps.",
        "The model can overfit a tiny batch, so it can learn. On held-out rows it is no better than after training "
        "with shuffled labels.",
        "lr.too-low optim.no-update data.unshuffled",
        "Shuffle, sort and filter inputs and labels together, with one permutation for both, or join them by key.",
        "Print a few rows with their labels and inspect them.",
        "Check that preprocessing keeps the information that the label depends on.",
    ),
    _cause(
        "data.class-collapse",
        "one class predicted for every row",
        "Accuracy equals the share of the most common class, and the loss stays near the entropy of the labels.",
        "The entropy of the predicted classes is near 0 while the labels have several classes.",
        "data.labels-uninformative lr.too-high model.dead-units",
        "Weight the classes in the loss, or sample them evenly with `WeightedRandomSampler`.",
        "Set the bias of the last layer to the log-frequencies of the classes, so that training starts at the base "
        "rate.",
        "Measure balanced accuracy instead, and collect more data of the rare classes.",
    ),
    _cause(
        "data.split-mismatch",
        "train and eval data differ",
        "Evaluation is bad from the start, although training goes well.",
        "Mean or spread of the inputs differ between the two splits by much more than chance.",
        "model.batchnorm-tiny-batch data.leakage model.train-mode-eval",
        "Use the same preprocessing code for both splits.",
        "Fit scaling statistics on the training split and apply them unchanged to the other split.",
        "Split again at random, unless the evaluation is meant to measure this shift.",
    ),
    _cause(
        "data.leakage",
        "the same rows in train and eval, or the label among the inputs",
        "Evaluation is better than is plausible, and the model performs badly on new data.",
        "Rows of the evaluation split occur, value for value, in the training split. `surefoot doctor` also names "
        "input columns that determine the label one to one, or that are its one-hot code.",
        "data.repeated-batches data.split-mismatch",
        "Remove the shared rows from the training split.",
        "Split by group (user, patient, document) before augmentation, not by row after it.",
        "Remove input columns that are derived from the label, or known only after it.",
        "Remove near-duplicates as well.",
    ),
    _cause(
        "data.worker-seeds",
        "workers draw the same numbers",
        "The data varies less than expected: the same augmentations or generated rows occur several times.",
        "The workers of a loader return the same batch one after another although each was asked for different rows: a "
        "random generator in the data set was copied to all of them.",
        "data.repeated-batches repro.unseeded",
        "Seed the data set's own generator in `worker_init_fn`, from `torch.initial_seed()`, which differs by worker.",
        "Draw from `torch` or `numpy.random` inside `__getitem__`: both are seeded for each worker.",
    ),
    _cause(
        "data.degenerate-batch",
        "a batch without information",
        "The loss spikes or drops for one step. If every batch is like this, nothing is learned.",
        "The inputs of a batch are constant or 0, or all of its labels are the same although the labels of the run "
        "vary.",
        "data.bad-batch data.unshuffled data.repeated-batches",
        "Print that batch before and after each step of the loading, and fix the step that loses the values.",
        "Check in the collate function that a batch has more than one distinct row, and raise an error otherwise.",
    ),
    _cause(
        "data.not-sharded",
        "every rank trains on the same data",
        "More GPUs do not make an epoch faster, and the result is that of a single GPU with its batch size.",
        "Fingerprints of the batches are the same on all ranks at every step that was compared, and change from step "
        "to step.",
        "data.repeated-batches dist.gradients-not-averaged",
        "Give the loader `sampler=DistributedSampler(dataset)` and call `sampler.set_epoch(epoch)` in each epoch.",
        "If each rank generates its own data, seed that generator with `seed + rank`.",
        "Split files or shards of a stream by rank: `files[rank::world_size]`.",
    ),
    _cause(
        "data.worker-died",
        "a worker process of a data loader died",
        "The script ends with `DataLoader worker (pid …) is killed by signal` or `exited unexpectedly`, often hours "
        "into a run, and at a line that has nothing to do with data.",
        "The error names the worker and how it ended: the signal or the exit code. An exception inside the data "
        "set is another error, which names the exception.",
        "memory.graph-retained device.out-of-memory",
        "Run with `num_workers=0`: an error that the worker could not report is then an ordinary one with a traceback.",
        "If the signal was `Killed`, lower `num_workers`, and keep large data in tensors, arrays or memory-mapped "
        "files, not in Python lists, which every worker copies as it reads them.",
        "If it was `Bus error`, give the container more shared memory: `--shm-size=8g`.",
        "Draw batches from `stabilizer.resume(loader)` with a `CheckpointManager`: the complete steps are saved before "
        "the error ends the run, and the next start continues there.",
    ),
    # ── loss ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "loss.softmax-before-cross-entropy",
        "softmax applied twice",
        "The model learns slowly, and the loss stops well above 0.",
        "Every row that reaches cross-entropy is non-negative and sums to 1: these are probabilities, and "
        "cross-entropy applies log-softmax to them again. With C classes, the loss cannot fall below ln(e + C - 1) - "
        "1.",
        "lr.too-low loss.bounded-output loss.logits-into-probability-loss",
        "Return the logits and remove the softmax; apply it only where you need probabilities.",
        "If the model must return probabilities, use `nll_loss(probabilities.clamp_min(eps).log(), target)`.",
    ),
    _cause(
        "loss.sigmoid-before-bce-logits",
        "sigmoid applied twice",
        "The loss stops at 0.3 to 0.5, and predictions never become confident.",
        "All values that reach BCE-with-logits are between 0 and 1, for any weights: a sigmoid is applied before the "
        "one inside the loss.",
        "loss.bounded-output lr.too-low data.labels-uninformative",
        "Return the logits and remove the sigmoid.",
        "If the model must return probabilities, use `binary_cross_entropy`, in float32.",
    ),
    _cause(
        "loss.logits-into-probability-loss",
        "logits where probabilities are expected",
        "The loss is negative and falls without limit, or BCE raises an error because its input is not between 0 and "
        "1.",
        "NLL receives rows whose exponentials do not sum to 1, or BCE receives values outside 0 to 1: as predictions, "
        "or as targets with a gradient if the two arguments are swapped.",
        "loss.sign-flipped loss.softmax-before-cross-entropy data.label-out-of-range",
        "Use the loss that takes logits: `cross_entropy` for `nll_loss`, `binary_cross_entropy_with_logits` for BCE.",
        "Or put `log_softmax` (for NLL) or `sigmoid` (for BCE) at the end of the model.",
    ),
    _cause(
        "loss.sign-flipped",
        "the loss has the wrong sign",
        "The loss falls towards minus infinity while the metric gets worse.",
        "Loss and metric fall together, and the loss has no lower bound: the negative of the intended loss is "
        "minimised.",
        "loss.logits-into-probability-loss lr.too-high",
        "Negate the loss.",
        "Check every term that is subtracted: an entropy bonus is subtracted, a penalty is added.",
    ),
    _cause(
        "loss.broadcast",
        "prediction and target shapes broadcast",
        "The loss stops at the variance of the target, because the model learns to predict the mean for every row.",
        "Prediction and target have different shapes, such as (N, 1) and (N), and their difference is an N x N table "
        "in which every row is compared with every other.",
        "lr.too-low data.labels-uninformative loss.bounded-output",
        "Match the shapes: `prediction.squeeze(-1)` or `target.unsqueeze(-1)`.",
        "Assert `prediction.shape == target.shape` before the loss.",
    ),
    _cause(
        "loss.bounded-output",
        "the output cannot reach the targets",
        "The loss stops above 0, and predictions stay at one value such as 0 or 1.",
        "The last activation limits predictions to a range for any weights, and some of the targets are outside this "
        "range.",
        "loss.broadcast model.saturated-units model.dead-units",
        "End the model with a linear layer.",
        "Scale the targets to the range of the activation.",
    ),
    _cause(
        "loss.undefined-op",
        "an operation outside its domain",
        "The loss is NaN or infinite although data and weights are finite, or the loss is finite but its gradient is "
        "not.",
        "The first non-finite result comes from log, sqrt, a division, a norm, a power or acos, or from the backward "
        "pass of one of them, with finite arguments.",
        "data.nonfinite-input precision.fp16-overflow mask.fully-masked-row",
        "Keep the argument inside the domain: `x.clamp_min(eps).log()`, `(x + eps).sqrt()`.",
        "Use the stable form: `log_softmax`, `logsumexp`, `softplus`, `binary_cross_entropy_with_logits`.",
        "With `torch.where`, make the argument safe before the operation: the gradient of the branch that is not "
        "selected is computed too, and 0 x NaN is NaN.",
    ),
    _cause(
        "loss.no-valid-targets",
        "a batch without any valid target",
        "The loss is NaN, or exactly 0, on some batches.",
        "Every target of the batch is the ignore index, so the mean is taken over zero elements.",
        "data.nonfinite-input loss.undefined-op",
        "Skip batches without a valid target.",
        "Divide the summed loss by `max(count, 1)`.",
        "Truncate sequences on the side that does not contain the targets.",
        cured_by={"skip-batch": "Skip batches"},
        must_cure=("skip-batch",),
    ),
    _cause(
        "loss.sum-reduction",
        "the loss is a sum",
        "A learning rate that works elsewhere diverges, and larger batches diverge sooner.",
        "Twice the rows give twice the loss and twice the gradient: the loss is the sum over the batch, not the mean.",
        "lr.too-high accum.not-divided model.exploding-gradient",
        'Use `reduction="mean"`, or divide by the number of rows.',
        "If you want the sum, divide the learning rate by the batch size.",
        cured_by={"lr-3": "divide the learning rate", "lr-10": "divide the learning rate"},
    ),
    _cause(
        "loss.term-dominates",
        "one loss term dominates",
        "The total loss falls, but only one of its terms improves.",
        "More than 99% of the gradient comes from one of the terms.",
        "loss.sum-reduction rl.reward-scale data.unscaled-input",
        "Reweight the terms so that their gradients have similar norms at the start.",
        "Average each term over the same units (rows, pixels, tokens).",
        "Learn the weights, for example by the uncertainty of each task.",
    ),
    _cause(
        "loss.target-offset",
        "targets at the wrong offset",
        "A language model reaches a very low loss at once and only repeats its input, or its loss falls slowly and "
        "stays high.",
        "The targets that reach the loss equal the input ids at the same positions (in a causal model), or those two "
        "positions later, and not those one position later.",
        "mask.leaks-future data.leakage data.labels-uninformative",
        "Shift once: compare `logits[:, :-1]` with `ids[:, 1:]`, or shift in the data and not in the model.",
        "Pass the unshifted ids as `labels` to models of `transformers`, which shift them internally.",
    ),
    _cause(
        "loss.padding-counted",
        "padding counts in the loss",
        "The loss falls quickly to a low level, but samples are poor or end too early.",
        "A large share of the counted targets is one id that fills the ends of the rows, over different lengths, where "
        "the input ids are constant too; the ignore index is a different id.",
        "data.class-collapse loss.no-valid-targets",
        "Pass the id of the padding as `ignore_index`, or set the targets of the padding to -100.",
        'With `reduction="none"`, multiply by the mask and divide by its sum.',
    ),
    # ── mask ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "mask.fully-masked-row",
        "an attention row is fully masked",
        "An attention layer outputs NaN, often only for a few batches.",
        "A softmax gets a row in which every value is minus infinity, which gives 0 / 0.",
        "data.nonfinite-input loss.undefined-op precision.fp16-overflow",
        "Use `surefoot.build.masked_softmax(scores, keep)`, which returns zeros for such a row (`keep` is True where a "
        "key may be used: invert a padding mask), or let every token attend to itself.",
        "Fill masks with a large negative number instead of minus infinity (`surefoot.build.mask_fill_value`).",
        "Remove empty sequences from the data.",
    ),
    _cause(
        "mask.inverted",
        "attention sees the padding instead of the tokens",
        "A model with attention learns little, as if each token stood alone.",
        "The keys that a mask keeps all have one id, which no ignored key has, and stand at one end of each row.",
        "mask.fully-masked-row data.labels-uninformative lr.too-low",
        "Invert the padding mask: `key_padding_mask` of `nn.MultiheadAttention` is True where a key is ignored, "
        "`attn_mask` of `scaled_dot_product_attention` is True where a key is used.",
        "Print the mask of one row beside its ids.",
    ),
    _cause(
        "mask.leaks-future",
        "the model sees the tokens that it must predict",
        "The loss is far too small for the task, and generated text is bad.",
        "Changing a later token changes the output at an earlier position.",
        "data.leakage data.repeated-batches",
        "Pass a causal mask (`is_causal=True`), and check whether True means masked or visible.",
        "Check that targets are shifted by one, and that no layer (convolution, pooling, normalisation over time) "
        "mixes positions.",
    ),
    # ── init ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "init.too-large",
        "initial weights too large",
        "The first loss is far above chance level, or it diverges before anything is learned.",
        "Activations or gradients grow from layer to layer before the first update, with inputs of unit scale.",
        "lr.too-high data.unscaled-input model.exploding-gradient",
        "Initialise again with `surefoot.init_for(model, overwrite=True)` (He or Xavier, depending on the activation "
        "after each layer).",
        "Scale the last layer of each residual branch down, and the output layer as well.",
        "Add normalisation layers.",
    ),
    _cause(
        "init.too-small",
        "initial weights too small",
        "Nothing is learned, because the outputs hardly depend on the inputs.",
        "Activations shrink from layer to layer before the first update, with inputs of unit scale.",
        "model.vanishing-gradient lr.too-low model.dead-units",
        "Initialise again with `surefoot.init_for(model, overwrite=True)`.",
        "Add residual connections and normalisation layers.",
    ),
    _cause(
        "init.symmetric",
        "units that start identical",
        "The network behaves as if each layer had one unit.",
        "Rows of a weight are equal at the start and stay equal after updates, because equal units get equal "
        "gradients.",
        "init.too-small model.dead-units lr.too-low",
        "Initialise weights at random. Use zeros only for biases and for the last layer of a residual branch.",
        "Search for `zeros_`, `ones_` or `constant_` on weights, or for a checkpoint of zeros.",
    ),
    # ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "model.dead-units",
        "units that are always zero",
        "Some units of a layer have no effect, so the effective model is smaller than intended.",
        "Units output exactly 0 for every input, so their gradient is exactly 0 too.",
        "lr.too-high init.symmetric optim.frozen-parameters",
        "Lower the learning rate: a single large step usually causes this.",
        "Use LeakyReLU, GELU or SiLU.",
        "Initialise again, with biases at 0, and put a normalisation layer before the activation.",
        cured_by={"lr-3": "Lower the learning rate", "lr-10": "Lower the learning rate"},
    ),
    _cause(
        "model.saturated-units",
        "activations at their bounds",
        "Learning is slow, especially in the early layers.",
        "Most outputs of a sigmoid or tanh are at its bounds, where its slope is nearly 0.",
        "model.vanishing-gradient data.unscaled-input init.too-large",
        "Standardise the inputs and use Xavier initialisation.",
        "Normalise before the activation.",
        "Use ReLU or GELU instead.",
    ),
    _cause(
        "model.vanishing-gradient",
        "gradients vanish towards the early layers",
        "Early layers hardly change while the last layers learn.",
        "The gradient of the first layers is many orders of magnitude smaller than that of the last ones, although "
        "activations have unit scale at the start.",
        "init.too-small model.saturated-units optim.frozen-parameters",
        "Use ReLU-like activations and the matching initialisation.",
        "Add normalisation layers.",
        "Add residual connections; for sequences use gates (LSTM, GRU) or attention.",
        "Use fewer layers.",
        cured_by={"smaller-model": "Use fewer layers"},
    ),
    _cause(
        "model.exploding-gradient",
        "gradients explode towards the early layers",
        "The loss spikes, then becomes NaN, more often with long sequences or deep models.",
        "The gradient grows with depth or sequence length, while the learning rate is in the usual range.",
        "lr.too-high init.too-large data.bad-batch",
        "Clip the gradient norm at 1.0.",
        "Initialise recurrent weights as orthogonal matrices, or use shorter truncated backpropagation.",
        "Use gates, residual connections or normalisation, or fewer layers.",
        cured_by={"clip": "Clip the gradient norm at 1.0", "smaller-model": "fewer layers"},
    ),
    _cause(
        "model.batchnorm-tiny-batch",
        "BatchNorm over too few values",
        "Training looks good and evaluation bad, even on the training data.",
        "Each mean and variance of a BatchNorm is computed from four values or fewer, so the running statistics used "
        "in evaluation differ from those used in training.",
        "data.split-mismatch model.train-mode-eval data.leakage",
        "Use larger batches, and drop an incomplete last batch (`drop_last=True`).",
        "Replace BatchNorm with GroupNorm or LayerNorm.",
        "Synchronise statistics across ranks (`SyncBatchNorm`).",
    ),
    _cause(
        "model.eval-mode-training",
        "training in eval mode",
        "Dropout has no effect, and BatchNorm's running statistics never change.",
        "`training` is False in a step that updates weights, usually after an evaluation that did not switch back.",
        "model.train-mode-eval model.batchnorm-tiny-batch",
        "Call `model.train()` before each training epoch, not once at the start.",
        "Wrap evaluation in a function that restores the mode.",
    ),
    _cause(
        "model.train-mode-eval",
        "evaluating in train mode",
        "Evaluation is noisy, differs from run to run and is worse than expected.",
        "Forward passes without gradients run with dropout on, or with BatchNorm using (and updating) batch "
        "statistics.",
        "model.eval-mode-training data.split-mismatch model.batchnorm-tiny-batch",
        "Call `model.eval()` before evaluation and `model.train()` after it.",
        "Do not rely on `torch.no_grad()`: it turns off gradients only, not dropout and batch statistics.",
    ),
    _cause(
        "model.unregistered-parameters",
        "parameters that no module registers",
        "Part of the model never learns, and is missing from its checkpoints.",
        "Leaf tensors that require a gradient take part in the loss, but are not in any `named_parameters()`.",
        "optim.parameters-missing optim.detached-graph optim.frozen-parameters",
        "Store submodules in `nn.ModuleList` or `nn.ModuleDict`, not in a Python list or dict.",
        "Wrap bare tensors in `nn.Parameter` and assign them to the module.",
        "Create the optimizer after that, so that it gets all of them.",
    ),
    _cause(
        "model.mixes-rows",
        "rows of a batch affect each other",
        "The loss stays near that of a constant answer or falls slowly, and predictions depend on what else is in the "
        "batch.",
        "An output has a gradient for the inputs of other rows, which begins at a reshape, at a softmax over the rows, "
        "or at attention over the rows. Each row has its own target.",
        "data.labels-uninformative optim.not-learning loss.logits-into-probability-loss",
        "Keep the batch as the first dimension in every `view`, `reshape`, `permute` and `transpose`.",
        "Compute softmax over the classes: `dim=-1`.",
        "Create attention, transformer and recurrent layers with `batch_first=True` if the batch comes first.",
    ),
    _cause(
        "model.collapsed-embedding",
        "all rows get the same embedding",
        "The loss of a self-supervised or metric model is at its bound, and its embeddings are useless.",
        "The loss compares outputs of the model with one another only, and the spread of their directions has fallen "
        "to a small part of what it was at the start.",
        "optim.not-learning gan.mode-collapse data.class-collapse",
        "Detach the side that the predictions are compared with, as in `similarity(p1, z2.detach())`.",
        "In a triplet loss, check the order of anchor, positive and negative, and how negatives are chosen.",
        "Add a term that keeps rows apart: negatives, or the variance of each dimension.",
    ),
    _cause(
        "model.attention-logit-growth",
        "attention logits grow",
        "A transformer trains well for a long time, then diverges.",
        "The largest attention logit grows steadily and the entropy of the heads falls, well before the loss changes.",
        "lr.too-high precision.fp16-overflow model.exploding-gradient",
        "Lower the learning rate, and clip gradients.",
        "Normalise queries and keys (QK-norm).",
        "Cap the logits, and keep the softmax in float32.",
        cured_by={"lr-3": "Lower the learning rate", "lr-10": "Lower the learning rate", "clip": "clip gradients"},
    ),
    # ── lr ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "lr.too-high",
        "learning rate too high",
        "The loss diverges, oscillates, or stays high after a sudden rise.",
        "Everything is normal at step 0, and updates are large relative to the weights before the loss rises. With a "
        "tenth of the rate, the same batches are learned.",
        "init.too-large data.unscaled-input loss.sum-reduction lr.no-warmup",
        "Divide the rate by 3 to 10; `surefoot.find_lr` finds the rate at which the loss diverges.",
        "Warm up over the first few hundred steps.",
        "Clip the gradient norm.",
        cured_by={
            "lr-3": "Divide the rate by 3 to 10",
            "lr-10": "Divide the rate by 3 to 10",
            "warm-up": "Warm up",
            "clip": "Clip the gradient norm",
        },
        must_cure=("lr-10",),
    ),
    _cause(
        "lr.too-low",
        "learning rate too low",
        "The loss falls very slowly, almost on a straight line.",
        "Gradients are steady and updates are tiny relative to the weights. With ten times the rate, the same batches "
        "are learned much faster, without instability.",
        "optim.no-update optim.epsilon clip.saturated precision.low-precision-weights",
        "Multiply the rate by 10 to 100; `surefoot.find_lr` suggests one.",
        "Check that the schedule has not already decayed it.",
        "With SGD, add momentum or switch to AdamW.",
    ),
    _cause(
        "lr.no-warmup",
        "full rate from the first step",
        "A transformer, or another model trained with Adam, diverges in its first steps and never recovers.",
        "Updates are too large only at the start: with a lower rate for the first steps only, the same peak rate "
        "works.",
        "lr.too-high init.too-large optim.epsilon",
        "Warm up over the first 1 to 5% of the steps (`surefoot.warmup_cosine`).",
        "Use pre-norm blocks, which need less warm-up.",
        cured_by={"warm-up": "Warm up"},
        must_cure=("warm-up",),
    ),
    _cause(
        "lr.schedule-broken",
        "the learning rate is not what was planned",
        "Learning stops early, or the loss jumps at unexpected steps.",
        "The recorded rate falls to a small part of its highest value long before the end, jumps, or rises again after "
        "its decay.",
        "lr.too-low lr.too-high resume.state-missing",
        "If milestones, `step_size` or `T_max` are numbers of epochs, call `scheduler.step()` after the loop over the "
        "batches; if they are numbers of batches, call it after each `optimizer.step()`.",
        "Print the rate over the planned steps before training.",
        "Save and restore the scheduler with the rest of the state.",
    ),
    # ── optim ────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "optim.missing-zero-grad",
        "gradients are never cleared",
        "The gradient norm grows from step to step, and the loss fluctuates or diverges.",
        "The gradient at a step equals the gradient of the previous step plus the new one.",
        "lr.too-high accum.not-divided model.exploding-gradient",
        "Call `optimizer.zero_grad()` once per step, before `backward()`.",
        "Check that it is called on the optimizer, or the model, that owns these parameters.",
    ),
    _cause(
        "optim.no-update",
        "steps that change nothing",
        "The loss does not change: it is exactly the same for the same batch.",
        "Gradients and an optimizer exist, but parameters stay bit for bit the same: `step()` is never called, or "
        "gradients are cleared between `backward()` and `step()`.",
        "lr.too-low optim.parameters-missing precision.scaler-stuck",
        "Order the loop: `zero_grad()`, forward, `backward()`, `step()`.",
        "Check that the optimizer has the parameters of this model, not of a model that was replaced or copied.",
        "Check that the learning rate is not 0.",
    ),
    _cause(
        "optim.parameters-missing",
        "parameters in no optimizer",
        "Part of the model never learns.",
        "Parameters receive a gradient at every step, but belong to no optimizer.",
        "optim.frozen-parameters model.unregistered-parameters optim.no-update",
        "Pass `model.parameters()`, or add a group for the missing ones with `add_param_group`.",
        "Create the optimizer after the last layer is added or replaced.",
        "If they should not change, set `requires_grad_(False)`, which also saves time.",
    ),
    _cause(
        "optim.frozen-parameters",
        "parameters frozen by accident",
        "The model hardly learns, like a linear model on fixed features.",
        "Most parameters have `requires_grad=False` although they were passed to the optimizer.",
        "optim.parameters-missing optim.detached-graph lr.too-low",
        "Call `requires_grad_(True)` on the parameters that should learn.",
        "If they should be frozen, pass only the other parameters to the optimizer.",
    ),
    _cause(
        "optim.detached-graph",
        "part of the model is detached from the loss",
        "Part of the model never learns, or `backward()` says that nothing requires a gradient.",
        "A parameter requires a gradient and takes part in the forward pass, but its gradient is None: the graph is "
        "cut between it and the loss.",
        "optim.frozen-parameters model.unregistered-parameters optim.no-gradient",
        "Remove `.detach()`, `.data`, `.item()`, `.numpy()`, `torch.tensor(...)` or `no_grad()` between the parameter "
        "and the loss.",
        "Replace `argmax`, rounding and indexing with a differentiable operation, such as a softmax.",
    ),
    _cause(
        "optim.stale-state",
        "moments of other parameters",
        "The loss jumps after a resume, a change of layers or a swap of weights.",
        "The moments in the optimizer do not match the parameters in shape, step count or scale.",
        "resume.state-missing lr.schedule-broken lr.too-high",
        "Restore the optimizer from the same checkpoint as the model.",
        "If the weights were changed on purpose, clear the state of these parameters and warm up again.",
        cured_by={"reset-moments": "clear the state"},
    ),
    _cause(
        "optim.epsilon",
        "epsilon of the wrong size",
        "Updates are tiny everywhere, or are noise where gradients are small.",
        "Adam's eps exceeds the square root of its second moment for most entries, or it is so small that noise is "
        "scaled up to full steps.",
        "lr.too-low clip.saturated precision.fp16-underflow",
        "Set eps to about the smallest square roots of the second moment; 1e-8 is the usual value.",
        "In fp16, use at least 1e-7: smaller values round to 0.",
        "Scale the loss up if gradients are always tiny.",
        cured_by={"eps": "Set eps"},
        must_cure=("eps",),
    ),
    _cause(
        "optim.weight-decay",
        "weight decay too strong",
        "Weights shrink steadily, and the loss stops falling.",
        "Weight norms fall at every step, and the update by decay is larger than the one by the gradient.",
        "lr.too-low init.too-small model.vanishing-gradient",
        "Lower the weight decay, for example to 0.01, the default of AdamW.",
        "Exclude biases and normalisation gains from weight decay (`surefoot.decay_groups`).",
        "Use AdamW, whose decay is separate from the moments.",
    ),
    _cause(
        "optim.not-learning",
        "nothing was learned",
        "The loss stays flat, or ends no lower than the loss of a constant answer.",
        "The loss ends at or above that of the best constant answer (the entropy of the labels, the variance of the "
        "targets), it no longer falls, and no other cause explains it. The size of the updates and gradients of 0 are "
        "reported as hints.",
        "data.labels-uninformative lr.too-low optim.no-update model.dead-units loss.softmax-before-cross-entropy",
        "Train on 16 rows until the loss is near 0. If that fails, the fault is in the model or the loss; if it works, "
        "it is in the data.",
        "Run `surefoot doctor file.py:build` on a function that returns model, loader, loss function and optimizer: it "
        "tries other learning rates and a small batch on copies of the model.",
        "Print inputs, targets and outputs of one batch directly before the loss, with their shapes.",
    ),
    _cause(
        "optim.no-gradient",
        "a step without any gradient",
        "The optimizer steps, but nothing changes.",
        "No parameter of the optimizer has a gradient at the step: `backward()` was not called, or it reached other "
        "parameters.",
        "optim.detached-graph optim.no-update optim.parameters-missing",
        "Call `backward()` on the loss before the step, and clear gradients after the step, not between the two.",
        "Check that the optimizer has the parameters that the loss depends on.",
    ),
    _cause(
        "optim.lost-microbatch",
        "a microbatch was dropped",
        "With accumulation, the result depends on how the batch is divided.",
        "Gradients changed or disappeared between two `backward()` calls of the same step, so part of the batch never "
        "reached the weights.",
        "accum.not-divided accum.uneven-microbatches optim.no-gradient",
        "Clear gradients once per optimizer step, not once per microbatch.",
        "Let the stabilizer clear gradients: it does so when the window is complete.",
    ),
    # ── eval ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "eval.random-eval",
        "evaluation is random",
        "Validation is noisy or worse than training, and differs between two evaluations of the same weights.",
        "Dropout is active in evaluations although the dropout modules of the model are off: a functional dropout "
        "without `training=`, or attention with a fixed `dropout_p`.",
        "model.train-mode-eval data.split-mismatch",
        "Pass `training=self.training` to the functional dropout, and call `model.eval()` before evaluating.",
        "Use `nn.Dropout`, which `model.eval()` switches off.",
    ),
    _cause(
        "eval.labels-mismatched",
        "evaluation labels belong to other rows",
        "Validation stays at chance level while training goes well.",
        "The inputs of both splits are similar. Training labels can be predicted from similar rows, but the labels of "
        "the evaluation rows cannot, neither by the model nor from the most similar training rows.",
        "data.split-mismatch data.labels-uninformative model.train-mode-eval",
        "Join inputs and labels of the evaluation split again by key, not by position.",
        "Print a few evaluation rows with their labels and inspect them.",
    ),
    # ── clip ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "clip.saturated",
        "every step is clipped",
        "Learning is slow, and its speed does not depend on the size of the gradient.",
        "Nearly every step is clipped strongly, so the limit acts as the learning rate.",
        "lr.too-low optim.epsilon model.exploding-gradient",
        "Raise the limit to the 95th percentile of the norms (`surefoot.build.clip_advice`).",
        "Find out why the norms are large: data scale, initialisation, or a sum instead of a mean.",
    ),
    _cause(
        "clip.before-unscale",
        "clipping scaled gradients",
        "Changing the learning rate or the clip limit does not have the expected effect.",
        "Gradients were clipped while still multiplied by the loss scale, so every step was clipped strongly.",
        "clip.saturated precision.fp16-underflow lr.too-low",
        "Call `scaler.unscale_(optimizer)` before clipping.",
        "Use `TrainingStabilizer`, which unscales before it clips.",
    ),
    # ── accum ────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "accum.not-divided",
        "accumulated loss not divided",
        "With k microbatches, training behaves as with a k times higher learning rate.",
        "There are k backward passes per step, and the gradient is their sum, not their mean.",
        "lr.too-high loss.sum-reduction optim.missing-zero-grad",
        "Divide each loss by k before `backward()`.",
        "Use `TrainingStabilizer(..., accumulate=k)`.",
    ),
    _cause(
        "accum.uneven-microbatches",
        "microbatches of unequal size",
        "The same batch gives a different loss when it is divided differently.",
        "Means over microbatches with different numbers of rows or tokens are averaged with equal weights.",
        "accum.not-divided optim.lost-microbatch",
        "Weight each microbatch by its count: `stabilizer.backward(loss, weight=tokens)`.",
        "Sum over the tokens, and divide once by the number of tokens in the whole step.",
        "Use microbatches of equal size, and drop the rest.",
    ),
    # ── precision ────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "precision.fp16-overflow",
        "numbers beyond fp16",
        "Inf or NaN appear in mixed precision, and the loss scale falls.",
        "The first Inf is in an fp16 tensor whose value would exceed 65504; the same step in float32 is finite.",
        "loss.undefined-op mask.fully-masked-row model.exploding-gradient",
        "Use bf16, which has the range of float32.",
        "Compute this operation in float32: cast before it, or turn autocast off around it.",
        "Find out why the value is large: sums over long axes, squares and attention logits are common reasons.",
        cured_by={"bf16": "Use bf16", "fp32": "in float32"},
        must_cure=("fp32",),
    ),
    _cause(
        "precision.fp16-underflow",
        "gradients rounded to zero",
        "Training stalls in fp16 but not in float32.",
        "A large share of the entries of fp16 gradients is exactly 0, but not in float32.",
        "lr.too-low model.vanishing-gradient model.dead-units",
        "Scale the loss with `GradScaler`, or give `precision='fp16'` to the stabilizer.",
        "Use bf16, which has the range of float32.",
        cured_by={"bf16": "Use bf16", "fp32": "range of float32"},
        must_cure=("fp32",),
    ),
    _cause(
        "precision.low-precision-weights",
        "updates too small for the weights' format",
        "Training stalls although gradients and learning rate are in the usual range.",
        "Weights are stored in half precision, and most entries are bit for bit the same after a step whose update is "
        "not 0, because the update is less than half a unit in the last place.",
        "lr.too-low optim.no-update precision.fp16-underflow",
        "Keep the weights in float32 and use autocast for the arithmetic.",
        "Keep float32 master weights in the optimizer.",
        "Use stochastic rounding.",
        cured_by={"fp32": "Keep the weights in float32"},
        must_cure=("fp32",),
    ),
    _cause(
        "precision.scaler-stuck",
        "the loss scale cannot fall further",
        "Every step is skipped, and the loss does not change.",
        "The scale is at its minimum and each step still overflows, so scaling is not the reason for the Inf.",
        "precision.fp16-overflow data.nonfinite-input loss.undefined-op",
        "Run one step in float32 and find the first non-finite tensor.",
        "Use bf16 and remove the scaler.",
        cured_by={"bf16": "Use bf16", "fp32": "in float32"},
        must_cure=("fp32",),
    ),
    # ── memory, dist, resume, repro ──────────────────────────────────────────────────────────────────────────────────
    _cause(
        "memory.graph-retained",
        "old graphs are kept alive",
        "Memory grows at every step until it runs out, or `backward()` raises an error about a second pass.",
        "The number of live tensors with a graph grows by the same amount each step: the script keeps a tensor of "
        "every step, together with its graph.",
        "data.repeated-batches",
        "Keep numbers, not tensors: `total += loss.item()`, or `loss.detach()` to avoid a sync.",
        "Detach the state that is carried from batch to batch: `h = h.detach()`.",
        "Remove `retain_graph=True` from the call of `backward()`.",
    ),
    _cause(
        "dist.replicas-diverged",
        "ranks hold different weights",
        "There is no symptom until the checkpoint of one rank behaves differently from another one.",
        "Hashes of the parameters differ between ranks at the same step.",
        "dist.gradients-not-averaged repro.unseeded hw.silent-corruption",
        "Broadcast the parameters from rank 0 at the start, which DDP does.",
        "Search for code that changes parameters outside the optimizer, or on one rank only.",
        "Check that all ranks take the same steps: a rank that skips a step alone diverges from the others.",
    ),
    _cause(
        "dist.gradients-not-averaged",
        "gradients are not averaged over the ranks",
        "More GPUs do not help, and the weights of the ranks diverge.",
        "Gradients of the same parameters differ between ranks when the optimizer steps.",
        "dist.replicas-diverged dist.scale-disagrees",
        "Wrap the model in DistributedDataParallel or `fully_shard`, and call the wrapper, not the inner module.",
        "Use `no_sync()` on all microbatches but the last.",
    ),
    _cause(
        "dist.scale-disagrees",
        "ranks scale the loss differently",
        "One rank skips a step that the others take.",
        "The loss scale differs between ranks at the same step.",
        "precision.fp16-overflow dist.replicas-diverged",
        "Reduce `found_inf` over all ranks (maximum) before the step.",
        "Use bf16, which needs no scale.",
    ),
    _cause(
        "dist.config-disagrees",
        "ranks run with different settings",
        "The weights of the ranks diverge, or one rank behaves differently from the others.",
        "Learning rate, optimizer, code, number of rows or versions differ between ranks that train one model.",
        "dist.replicas-diverged dist.scale-disagrees dist.gradients-not-averaged",
        "Set learning rate and optimizer from one configuration, without a condition on the rank.",
        "Start every rank from the same checkout, the same environment and the same copy of the data.",
        "Step the scheduler on every rank with the same value: reduce a metric over the ranks first.",
    ),
    _cause(
        "dist.hang",
        "a rank stops, and the others wait for it",
        "The run stops making progress with idle devices, or ends with a timeout or `Connection closed by peer`.",
        "One rank has ended, was killed, does not return from a line where it waits for no other rank, or is in "
        "another collective than the rest. Its step, its line and its stack are in the evidence.",
        "dist.collective-failed device.out-of-memory",
        "Look at the line of the rank that is named, and at `stacks.txt` in its folder.",
        "Call collectives (also those of DDP and of barriers) on every rank, in the same order, outside of conditions "
        "on the rank.",
        "Give every rank the same number of batches, and decide together when to stop.",
        "Add a time limit to calls that may wait indefinitely, such as a queue, a lock or a download.",
    ),
    _cause(
        "dist.collective-failed",
        "ranks could not communicate",
        "`DistBackendError: NCCL error`, a timeout of a collective, or a connection that another rank closed.",
        "The error message of NCCL or gloo, with its kind and reason.",
        "dist.hang device.out-of-memory device.illegal-access",
        "Read the output of the rank that failed first. The other ranks only report that it ended.",
        "Run once with the environment variable `NCCL_DEBUG=INFO`, which prints what NCCL was doing.",
        "Check that all ranks call the same collectives in the same order, with the same number of batches.",
    ),
    _cause(
        "resume.state-missing",
        "a restart without part of the state, or a load that loads nothing",
        "The loss jumps at a restart and takes a long time to recover.",
        "Parameters are restored, but moments, schedule or loss scale start again; or no name of a loaded state is in "
        "the model.",
        "optim.stale-state lr.schedule-broken resume.data-replayed",
        "Save and load optimizer, scheduler and scaler together with the model.",
        "Test it: a run of 20 steps must equal a run that is stopped after 10 steps and restarted for 10 more.",
        "If the state is lost, warm up again.",
        cured_by={"warm-up": "warm up again"},
    ),
    _cause(
        "resume.data-replayed",
        "a restart repeats old batches",
        "The training loss is falsely low after a restart.",
        "Batches after the restart have the fingerprints of batches before it, in the same epoch.",
        "data.repeated-batches data.leakage resume.state-missing",
        "Save the position in the data with the checkpoint, and skip to it on resume.",
        "Use a loader with state, such as torchdata's `StatefulDataLoader`.",
        "Seed the order with the epoch or the step.",
    ),
    _cause(
        "repro.unseeded",
        "runs differ from each other",
        "The same command gives another result each time.",
        "No seed was set before the first random number, or deterministic operations were requested but are off.",
        "hw.silent-corruption dist.replicas-diverged",
        "Call `surefoot.seed_everything(42)` before building model and data.",
        "Seed loader workers with `surefoot.seed_worker`.",
        "Turn on `torch.use_deterministic_algorithms(True)`.",
        cured_by={"deterministic": "use_deterministic_algorithms"},
    ),
    # ── rl, gan, hw ──────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "rl.kl-blowup",
        "the policy moves far from its reference",
        "The reward rises, then collapses, and samples degenerate.",
        "The KL divergence from the old or reference policy rises first, and the reward falls afterwards.",
        "rl.ratio-explosion lr.too-high rl.entropy-collapse",
        "Raise the KL coefficient, or stop the inner epochs when KL exceeds a target.",
        "Lower the learning rate.",
        "Take fewer passes over each batch of samples.",
        cured_by={"lr-3": "Lower the learning rate", "lr-10": "Lower the learning rate"},
    ),
    _cause(
        "rl.entropy-collapse",
        "the policy stops exploring",
        "The reward stops improving early, and all actions are similar.",
        "The entropy of the policy goes to 0 while rewards are still far from their maximum.",
        "rl.zero-advantage rl.kl-blowup lr.too-high",
        "Add or raise the entropy bonus.",
        "Lower the learning rate of the policy.",
        "Use a larger upper than lower clipping bound, so that the probability of rare actions can grow.",
        cured_by={"lr-3": "Lower the learning rate", "lr-10": "Lower the learning rate"},
    ),
    _cause(
        "rl.ratio-explosion",
        "importance ratios with a heavy tail",
        "Gradients spike on some batches of samples.",
        "A few probability ratios between new and old policy are orders of magnitude above the others.",
        "rl.kl-blowup data.bad-batch model.exploding-gradient",
        "Clip the ratio on both sides, also for negative advantages.",
        "Use fresher samples: fewer steps between sampling and training.",
        "Check that sampler and trainer compute the same log-probabilities.",
    ),
    _cause(
        "rl.zero-advantage",
        "all samples get the same reward",
        "The policy loss is almost 0, and nothing is learned.",
        "Advantages, or the variance of rewards within each group, are 0.",
        "rl.entropy-collapse rl.reward-scale lr.too-low",
        "Check the grouping: samples of one prompt belong to one group.",
        "Filter out tasks that are always or never solved.",
        "Use a denser reward.",
    ),
    _cause(
        "rl.reward-scale",
        "returns far from unit scale",
        "The value loss is much larger than the policy loss, and the policy hardly learns.",
        "Returns are far from unit scale, and nearly all of the gradient comes from the value term.",
        "loss.term-dominates data.unscaled-input rl.zero-advantage",
        "Normalise rewards by a running standard deviation.",
        "Clip the value loss, or lower its coefficient.",
        "Use separate networks for policy and value.",
    ),
    _cause(
        "gan.discriminator-wins",
        "the discriminator is too strong",
        "Samples stop improving and the generator's loss rises.",
        "The discriminator's loss goes to 0, and with it the gradient that reaches the generator.",
        "gan.mode-collapse model.vanishing-gradient lr.too-low",
        "Use the non-saturating or the hinge loss, and lower the discriminator's learning rate.",
        "Add a gradient penalty or spectral normalisation.",
        "Add noise or augmentation to the inputs of the discriminator.",
    ),
    _cause(
        "gan.mode-collapse",
        "the generator produces only a few different samples",
        "The generator repeats the same few samples.",
        "The spread within a batch of samples falls far below that of the data, while the loss of the discriminator "
        "does not go to 0.",
        "gan.discriminator-wins rl.entropy-collapse",
        "Lower the generator's learning rate, or train the discriminator for more steps.",
        "Add a gradient penalty, or give the discriminator statistics of the whole batch.",
        "Change to a Wasserstein objective.",
    ),
    _cause(
        "device.assert",
        "a kernel failed an assertion",
        "`CUDA error: device-side assert triggered`. The line in the traceback may not be the one that failed.",
        "The error itself, while all ids and labels of embeddings and losses that were recorded on the host before it "
        "are in range.",
        "data.token-mismatch data.label-out-of-range",
        "Run the script once with the environment variable `CUDA_LAUNCH_BLOCKING=1`: the traceback then names the "
        "line that failed.",
        "Run the failing step on the CPU, where torch names the index.",
        "Compare the values that index a tensor with the size of that tensor.",
    ),
    _cause(
        "device.illegal-access",
        "a kernel accessed invalid memory",
        "`CUDA error: an illegal memory access was encountered`, `misaligned address` or `unspecified launch failure`. "
        "The line in the traceback may not be the one that failed.",
        "The error itself, while all ids and labels of embeddings and losses that were recorded on the host before it "
        "are in range.",
        "device.assert hw.silent-corruption",
        "Run the script once with the environment variable `CUDA_LAUNCH_BLOCKING=1`: the traceback then names the "
        "call that failed.",
        "Run the script once under `compute-sanitizer`, which names the kernel and the address.",
        "Replace the custom extension or kernel with torch's own operation, and compare.",
    ),
    _cause(
        "device.out-of-memory",
        "out of memory on the accelerator",
        "`torch.OutOfMemoryError`, at the first step or after many.",
        "The error itself, with the memory in use after the previous steps: it grew with every step, or one step needs "
        "more than is available.",
        "memory.graph-retained",
        "Evaluate under `torch.no_grad()`, and do not keep tensors of past steps.",
        "Split the batch: accumulate over microbatches, or use `run_microbatches` of a `TrainingStabilizer`.",
        "Recompute activations (`torch.utils.checkpoint`), or train in bf16.",
    ),
    # ── fit ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "fit.overfitting",
        "the model overfits its training data",
        "The training loss continues to fall while the validation loss rises.",
        "The validation loss has its minimum in the middle of the run. After it, the loss rises steadily by a large "
        "part of the improvement, while the training loss falls. The finding names the step at which to stop.",
        "data.split-mismatch data.leakage fit.erratic-validation fit.forgetting",
        "Stop at the step of the lowest validation loss, or use the checkpoint of that step.",
        "Add weight decay, dropout or data augmentation.",
        "Use a smaller model, or more data. If the validation accuracy still rises, the model is only overconfident: "
        "label smoothing or temperature scaling is enough.",
    ),
    _cause(
        "fit.erratic-validation",
        "the validation loss jumps up and down",
        "The best checkpoint is largely a matter of chance.",
        "From one pass to the next, the validation loss changes up and down by a large part of the total improvement, "
        "while the training loss falls smoothly.",
        "model.train-mode-eval model.batchnorm-tiny-batch lr.too-high fit.overfitting",
        "Evaluate more rows, the same ones each time, in evaluation mode.",
        "Let the learning rate decay to 0, or evaluate an average of the weights (`torch.optim.swa_utils`).",
        "Replace BatchNorm with GroupNorm or LayerNorm: its running statistics lag behind the weights.",
    ),
    _cause(
        "fit.forgetting",
        "fine-tuning overwrites earlier knowledge",
        "The model learns the new task but loses the old one.",
        "The loaded model has a low loss on a validation set before the first step. That loss rises while the training "
        "loss falls.",
        "fit.overfitting data.split-mismatch lr.too-high resume.state-missing",
        "Divide the learning rate by 10.",
        "Mix rows of the old task into the batches.",
        "Train only adapters (LoRA) or the last layers, and freeze the other parameters.",
        cured_by={"lr-10": "Divide the learning rate"},
    ),
    # ── hw ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "hw.silent-corruption",
        "the hardware computed a wrong result",
        "A single spike that cannot be reproduced.",
        "The same step from the same state gives a different result, although deterministic operations are on.",
        "data.bad-batch repro.unseeded lr.too-high",
        "Run the captured step again with `surefoot replay`: it says whether the result differs from the record.",
        "Run the vendor's diagnostics on this device.",
        "Remove the device from the job.",
    ),
)

CATALOGUE: dict[str, Cause] = {cause.code: cause for cause in _CAUSES}
"""Every cause by its code, family by family."""


def nearest_codes(code: str, count: int = 3) -> list[str]:
    """The codes most like one that does not exist; a part of a code finds those that contain it."""
    close = difflib.get_close_matches(code, CATALOGUE, n=count)
    partly = [known for known in CATALOGUE if code and code.lower() in known]
    by_name = difflib.get_close_matches(code.split(".")[-1], [known.split(".")[1] for known in CATALOGUE], n=count)
    named = [known for known in CATALOGUE if known.split(".")[1] in by_name]
    return list(dict.fromkeys([*close, *partly, *named]))[:count]


def to_markdown() -> str:
    """The catalogue as a page of the documentation; `python -m surefoot.diagnose.catalogue` prints it."""
    parts = [
        "# Causes",
        f"surefoot can name {len(CATALOGUE)} causes. Codes are never renamed. `surefoot explain CODE` prints the same "
        "text. This page is generated from the catalogue: do not edit it by hand.",
    ]
    for family, covers in FAMILIES.items():
        parts.append(f"## {family}: {covers}")
        parts += [_section(cause) for cause in CATALOGUE.values() if cause.family == family]
    return "\n\n".join(parts) + "\n"


def _section(cause: Cause) -> str:
    fixes = "\n".join(f"{number}. {fix}" for number, fix in enumerate(cause.fixes, 1))
    look_alikes = ", ".join(f"[`{code}`](#{_anchor(code)})" for code in cause.look_alikes)
    return (
        f"### {cause.code}\n\n{cause.title[0].upper()}{cause.title[1:]}.\n\n**Symptom.** {cause.symptom}\n\n"
        f"**Evidence.** {cause.evidence}\n\n**Fixes, from fast to invasive**\n\n{fixes}\n\n**Similar causes** "
        f"{look_alikes}"
    )


def _anchor(code: str) -> str:
    """The name the documentation gives a heading: dots are dropped."""
    return code.replace(".", "")


if __name__ == "__main__":
    print(to_markdown(), end="")
