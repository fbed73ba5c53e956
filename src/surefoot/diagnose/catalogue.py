"""Every cause surefoot can name: what it looks like, what proves it, what it is mistaken for, what to do.

A cause has a code such as `lr.too-high`; codes are a public contract and are never renamed. The texts teach: the
symptom is what a person sees, the evidence is what separates this cause from those that look like it, and the fixes go
from the one that takes a minute to the one that changes the model. `surefoot explain CODE` and the docs print them as
they are.

Only the standard library is imported here, so that the command line can answer without torch. Left out: the rules that
measure the evidence, which live beside what they measure.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FAMILIES = {
    "data": "what goes in",
    "loss": "what is minimised",
    "mask": "what may see what",
    "init": "where it starts",
    "model": "what computes",
    "lr": "how far each step goes",
    "optim": "what is updated, and how",
    "eval": "how the model is judged",
    "clip": "how gradients are limited",
    "accum": "how microbatches add up",
    "precision": "how numbers are rounded",
    "memory": "what is kept alive",
    "dist": "whether ranks agree",
    "resume": "what a restart brings back",
    "repro": "whether it happens twice",
    "rl": "policies and rewards",
    "gan": "generators and discriminators",
    "device": "what the accelerator ends a script with",
    "fit": "what holds for new data",
    "hw": "the machine",
}
"""The first part of a code, and what it covers, in the order of the catalogue."""


@dataclass(frozen=True)
class Cause:
    """One way in which training goes wrong."""

    code: str
    """Family and name, such as `loss.broadcast`; never renamed."""

    title: str
    """What is wrong, in a few words."""

    symptom: str
    """What a person sees."""

    evidence: str
    """What singles this cause out among its look-alikes."""

    look_alikes: tuple[str, ...]
    """Codes of the causes it is mistaken for."""

    fixes: tuple[str, ...]
    """What to do, from fast to invasive."""

    cured_by: Mapping[str, str] = field(default_factory=dict)
    """The changes of `surefoot bisect` that are among the fixes, and the words of the fix that say so."""

    must_cure: tuple[str, ...] = ()
    """Of those, the ones that cure the run if the cause is the only one. If one of them leaves the failure exactly
    where it was, that speaks against the cause; if the failure comes later, the change may merely have been too
    small."""

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
        "The loss is NaN from one step to the next, on a batch that is otherwise nothing special.",
        "Going back from the loss, the first tensor that holds a NaN or an Inf is a model input or a target: the "
        "arithmetic after it did nothing wrong.",
        "loss.undefined-op precision.fp16-overflow lr.too-high mask.fully-masked-row",
        "Find the row and drop or fill it before it is batched.",
        "Check `torch.isfinite` over the whole data set once, when it is built.",
        "Have broken steps refused with `TrainingStabilizer` or `surefoot run --guard`, so that one row costs one "
        "step.",
        cured_by={"skip-batch": "Have broken steps refused"},
    ),
    _cause(
        "data.unscaled-input",
        "inputs far from unit scale",
        "The loss hardly moves, or blows up in the first few steps, whatever the model.",
        "At step 0, before any update, the inputs have a mean or spread tens of times away from 1, while learning "
        "rate and initial weights are ordinary.",
        "lr.too-high lr.too-low init.too-large",
        "Standardise each feature with statistics of the training split, for example with `surefoot.Standardizer`.",
        "Divide image bytes by 255, or use `surefoot.build.normalize_images`.",
        "Put a normalisation layer first, so that the scale can no longer matter.",
    ),
    _cause(
        "data.bad-batch",
        "one bad batch",
        "The loss spikes for one step and comes back; in the next epoch it spikes again at the same place.",
        "Input, target or loss of that one batch lies far outside all others, and the spike follows the batch when "
        "the order changes.",
        "lr.too-high hw.silent-corruption model.exploding-gradient",
        "Look at the rows of that batch, and filter them out.",
        "Clip gradients, so that a single batch cannot throw the weights far.",
        "Use a loss that forgives outliers, such as Huber's.",
        cured_by={"skip-batch": "filter them out", "clip": "Clip gradients"},
    ),
    _cause(
        "data.unshuffled",
        "data in sorted order",
        "The loss is a sawtooth: it falls within a stretch of similar rows and jumps when the next kind begins.",
        "Labels within a batch are far less mixed than in the whole data set, or the loss repeats with the period of "
        "an epoch.",
        "data.repeated-batches lr.too-high lr.schedule-broken",
        "Pass `shuffle=True` to the loader.",
        "For streams, shuffle the shards and keep a buffer of a few thousand rows to draw from.",
        cured_by={"other-batches": "shuffle=True"},
    ),
    _cause(
        "data.repeated-batches",
        "the same batches again",
        "Training looks suspiciously easy, and evaluation does not follow.",
        "Fingerprints of batches come again within one epoch, or in exactly the same order in every epoch although "
        "the sampler should have drawn anew.",
        "data.leakage resume.data-replayed data.unshuffled",
        "Do not reseed inside the epoch loop; call `sampler.set_epoch(epoch)` on a distributed sampler.",
        "Make sure that the iterator moves on: `next(iter(loader))` returns the first batch every time.",
        "Remove duplicates from the data set.",
    ),
    _cause(
        "data.label-out-of-range",
        "labels outside the range of the classes",
        "The loss crashes with an index error, on a GPU with a device-side assert, or is NaN.",
        "Some labels lie outside 0 to C-1, where C is the number of outputs, and are not the ignore index.",
        "data.token-mismatch loss.no-valid-targets",
        "Map labels to 0 to C-1, and check their minimum and maximum against the width of the last layer.",
        "If they count from 1, subtract 1; if -1 means unlabelled, pass `ignore_index=-1`.",
        "Widen the last layer when a class was left out.",
    ),
    _cause(
        "data.token-mismatch",
        "token ids and embedding disagree",
        "The embedding crashes with an index error, or the model learns from garbage.",
        "Ids reach beyond the rows of the embedding table, or stay within a small corner of it: the tokenizer is not "
        "the one the table was made for.",
        "data.label-out-of-range data.labels-uninformative",
        "Load tokenizer and model from the same place.",
        "Resize the embedding (and the output layer tied to it) after adding tokens.",
        "Tokenise the data again.",
    ),
    _cause(
        "data.labels-uninformative",
        "labels do not belong to the inputs",
        "The loss stays at chance on the whole data set, and nothing in the optimizer helps.",
        "The model does overfit a tiny batch, so it can learn; but on held-out rows it does no better than after "
        "training with the labels shuffled.",
        "lr.too-low optim.no-update data.unshuffled",
        "Print a few rows with their labels and look.",
        "Join inputs and labels again by key, not by position: one shuffled or filtered side is enough.",
        "Check that preprocessing keeps what the label depends on.",
    ),
    _cause(
        "data.class-collapse",
        "one class predicted for all",
        "Accuracy equals the share of the commonest class, and the loss rests near the entropy of the labels.",
        "The entropy of the predicted classes is near 0 while the labels have several classes.",
        "data.labels-uninformative lr.too-high model.dead-units",
        "Weight the classes in the loss, or draw them evenly with `WeightedRandomSampler`.",
        "Set the bias of the last layer to the log-frequencies of the classes, so that training starts at the base "
        "rate.",
        "Judge by balanced accuracy instead, and collect more of the rare classes.",
    ),
    _cause(
        "data.split-mismatch",
        "train and eval data differ",
        "Evaluation is bad from the very first time, although training goes well.",
        "Mean or spread of the inputs differ between the two splits by much more than chance.",
        "model.batchnorm-tiny-batch data.leakage model.train-mode-eval",
        "Send both splits through one and the same preprocessing code.",
        "Fit scaling statistics on the training split and apply them, unchanged, to the other.",
        "Split again at random, unless the shift is the point of the evaluation.",
    ),
    _cause(
        "data.leakage",
        "the same rows in train and eval, or the label among the inputs",
        "Evaluation is too good to be true, and the model disappoints in use.",
        "Rows of the evaluation split are found, value for value, in the training split. `surefoot doctor` also names "
        "columns of an input that stand for the label one to one, or are its one-hot code.",
        "data.repeated-batches data.split-mismatch",
        "Remove the shared rows from the training split.",
        "Split by group (user, patient, document) before augmenting, not by row after it.",
        "Take columns that are made from the label, or known only after it, out of the inputs.",
        "Remove near-duplicates as well.",
    ),
    _cause(
        "data.worker-seeds",
        "workers draw the same numbers",
        "Less variety than the loader promises: augmentation or generated rows come several times.",
        "The workers of a loader hand out the same batch one after another although each was asked for its own rows: "
        "a generator that the data set holds was copied to all of them.",
        "data.repeated-batches repro.unseeded",
        "Seed the data set's own generator in `worker_init_fn`, from `torch.initial_seed()`, which differs by worker.",
        "Draw from `torch` or `numpy.random` inside `__getitem__`: both are seeded for each worker.",
    ),
    _cause(
        "data.degenerate-batch",
        "a batch with nothing to learn from",
        "Sometimes a spike, sometimes a loss that is too easy for one step; or, if every batch is so, no learning.",
        "The inputs of a batch are constant or 0, or all of its labels are one although the run's labels are mixed.",
        "data.bad-batch data.unshuffled data.repeated-batches",
        "Print that batch before and after each step of the loading, and mend the one that loses its values.",
        "Check in the collate function that a batch has more than one distinct row, and raise if it has not.",
    ),
    _cause(
        "data.not-sharded",
        "every rank trains on the same data",
        "More GPUs make an epoch no faster, and the result is that of one GPU with one GPU's batch.",
        "Fingerprints of the batches are the same on all ranks at every step that was compared, and change from step "
        "to step.",
        "data.repeated-batches dist.gradients-not-averaged",
        "Give the loader `sampler=DistributedSampler(dataset)` and call `sampler.set_epoch(epoch)` in each epoch.",
        "If each rank makes its own data, seed the generator of the data with the rank added.",
        "Split files or shards of a stream by rank: `files[rank::world_size]`.",
    ),
    _cause(
        "data.worker-died",
        "a worker process of a data loader died",
        "The script ends with `DataLoader worker (pid …) is killed by signal` or `exited unexpectedly`, often hours "
        "into a run, and at a line that has nothing to do with data.",
        "The error names the worker and how it ended: the signal or the exit code. An exception inside of the data "
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
        "It learns, but slowly, and the loss stops at a floor well above 0.",
        "Every row that reaches cross-entropy is non-negative and sums to 1: these are probabilities, and "
        "cross-entropy applies log-softmax to them once more. The loss cannot fall under ln(e + C - 1) - 1 with C "
        "classes.",
        "lr.too-low loss.bounded-output loss.logits-into-probability-loss",
        "Return the logits and drop the softmax; apply it only where you need probabilities.",
        "If the model must return probabilities, take `nll_loss(probabilities.clamp_min(eps).log(), target)`.",
    ),
    _cause(
        "loss.sigmoid-before-bce-logits",
        "sigmoid applied twice",
        "The loss rests at a floor of 0.3 to 0.5 and predictions never become confident.",
        "All values that reach BCE-with-logits lie between 0 and 1, whatever the weights are: a sigmoid came before "
        "the one inside the loss.",
        "loss.bounded-output lr.too-low data.labels-uninformative",
        "Return the logits and drop the sigmoid.",
        "If the model must return probabilities, use `binary_cross_entropy`, in float32.",
    ),
    _cause(
        "loss.logits-into-probability-loss",
        "logits where probabilities are expected",
        "The loss is negative and falls without end, or BCE crashes because its input is not between 0 and 1.",
        "NLL receives rows whose exponentials do not sum to 1, or BCE receives values outside 0 to 1.",
        "loss.sign-flipped loss.softmax-before-cross-entropy",
        "Use the loss that takes logits: `cross_entropy` for `nll_loss`, `binary_cross_entropy_with_logits` for BCE.",
        "Or put `log_softmax` (for NLL) or `sigmoid` (for BCE) at the end of the model.",
    ),
    _cause(
        "loss.sign-flipped",
        "the loss has the wrong sign",
        "The loss runs to minus infinity while the metric gets worse.",
        "Loss and metric fall together, and nothing bounds the loss from below: what is minimised is the negative of "
        "what was meant.",
        "loss.logits-into-probability-loss lr.too-high",
        "Negate the loss.",
        "Check every term that is subtracted: an entropy bonus is subtracted, a penalty is added.",
    ),
    _cause(
        "loss.broadcast",
        "prediction and target shapes broadcast",
        "The loss stops at the variance of the target: the model learns to predict the mean for every row.",
        "Prediction and target have different shapes, such as (N, 1) and (N), and their difference is an N x N table "
        "in which every row is compared with every other.",
        "lr.too-low data.labels-uninformative loss.bounded-output",
        "Match the shapes: `prediction.squeeze(-1)` or `target.unsqueeze(-1)`.",
        "Assert `prediction.shape == target.shape` before the loss.",
    ),
    _cause(
        "loss.bounded-output",
        "the output cannot reach the targets",
        "The loss has a floor, and predictions sit at one value such as 0 or 1.",
        "The last activation keeps predictions within bounds under any weights, and a share of the targets lies "
        "beyond them.",
        "loss.broadcast model.saturated-units model.dead-units",
        "End the model with a linear layer.",
        "Or scale the targets into the range the activation can reach.",
    ),
    _cause(
        "loss.undefined-op",
        "an operation outside its domain",
        "The loss is NaN or infinite although data and weights are finite; or the loss is finite and its gradient is "
        "not.",
        "The first non-finite result comes from log, sqrt, a division, a norm, a power or acos, or from the backward "
        "of one, with finite arguments.",
        "data.nonfinite-input precision.fp16-overflow mask.fully-masked-row",
        "Keep the argument inside the domain: `x.clamp_min(eps).log()`, `(x + eps).sqrt()`.",
        "Use the stable form: `log_softmax`, `logsumexp`, `softplus`, `binary_cross_entropy_with_logits`.",
        "With `torch.where`, make the argument safe before the operation: the gradient of the branch that was not "
        "taken is computed too, and 0 x NaN is NaN.",
    ),
    _cause(
        "loss.no-valid-targets",
        "a batch without a single target",
        "The loss is NaN, or exactly 0, on some batches.",
        "Every target of the batch is the ignore index, so the mean is taken over nothing.",
        "data.nonfinite-input loss.undefined-op",
        "Skip batches in which no target counts.",
        "Divide the summed loss by `max(count, 1)`.",
        "Truncate from the side that does not hold the targets.",
        cured_by={"skip-batch": "Skip batches"},
        must_cure=("skip-batch",),
    ),
    _cause(
        "loss.sum-reduction",
        "the loss is a sum",
        "A learning rate that works elsewhere diverges, and the larger the batch the sooner.",
        "Twice the rows give twice the loss and twice the gradient: the loss adds over the batch instead of averaging.",
        "lr.too-high accum.not-divided model.exploding-gradient",
        'Use `reduction="mean"`, or divide by the number of rows.',
        "If the sum is meant, divide the learning rate by the batch size.",
        cured_by={"lr-3": "divide the learning rate", "lr-10": "divide the learning rate"},
    ),
    _cause(
        "loss.term-dominates",
        "one loss term dominates",
        "The total loss falls, but only one of the things it is made of gets better.",
        "More than 99 % of the gradient comes from one of the terms.",
        "loss.sum-reduction rl.reward-scale data.unscaled-input",
        "Reweight the terms so that their gradients have similar norms at the start.",
        "Average each term over the same thing (rows, pixels, tokens).",
        "Learn the weights, for example by the uncertainty of each task.",
    ),
    _cause(
        "loss.target-offset",
        "targets at the wrong offset",
        "A language model that is too good at once and only repeats its input, or one that stays stuck.",
        "The targets that reach the loss are, value for value, the input ids at the same positions, and the model sees "
        "only the inputs so far, or the input ids two positions later; not those one position later.",
        "mask.leaks-future data.leakage data.labels-uninformative",
        "Shift once: compare `logits[:, :-1]` with `ids[:, 1:]`, or shift in the data and not in the model.",
        "Pass the ids themselves as `labels` to models of `transformers`, which shift them inside.",
    ),
    _cause(
        "loss.padding-counted",
        "padding counts in the loss",
        "The loss falls fast and to a low level, and samples are poor or end too early.",
        "A large share of the targets that count is one id, in runs of different lengths at the end of the rows, where "
        "the input ids are constant as well; the ignore index is another one.",
        "data.class-collapse loss.no-valid-targets",
        "Pass the id of the padding as `ignore_index`, or set the targets of the padding to -100.",
        'With `reduction="none"`, multiply by the mask and divide by its sum.',
    ),
    # ── mask ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "mask.fully-masked-row",
        "an attention row is fully masked",
        "NaN comes out of an attention layer, often on one batch in many.",
        "A softmax receives a row that is minus infinity everywhere: 0 / 0.",
        "data.nonfinite-input loss.undefined-op precision.fp16-overflow",
        "Use `surefoot.build.masked_softmax`, which gives zeros for such a row, or let every token see itself.",
        "Fill masks with a large negative number instead of minus infinity (`surefoot.build.mask_fill_value`).",
        "Drop empty sequences from the data.",
    ),
    _cause(
        "mask.leaks-future",
        "the model sees the tokens that it must predict",
        "The loss is far too small for the task, and what the model generates is bad.",
        "Changing a later token changes the output at an earlier position.",
        "data.leakage data.repeated-batches",
        "Pass a causal mask (`is_causal=True`), and check which way round its booleans are.",
        "Check that targets are shifted by one, and that no layer (convolution, pooling, normalisation over time) "
        "mixes positions.",
    ),
    # ── init ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "init.too-large",
        "initial weights too large",
        "The first loss is far above chance, or it explodes before anything is learnt.",
        "Activations or gradients grow from layer to layer before the first update, with inputs of ordinary scale.",
        "lr.too-high data.unscaled-input model.exploding-gradient",
        "Initialise again with `surefoot.init_for(model)` (He or Xavier, by what follows each layer).",
        "Scale the last layer of each residual branch down, and the output layer as well.",
        "Add normalisation layers.",
    ),
    _cause(
        "init.too-small",
        "initial weights too small",
        "Nothing is learnt: the outputs hardly depend on the inputs.",
        "Activations shrink from layer to layer before the first update, with inputs of ordinary scale.",
        "model.vanishing-gradient lr.too-low model.dead-units",
        "Initialise again with `surefoot.init_for(model)`.",
        "Add residual connections and normalisation layers.",
    ),
    _cause(
        "init.symmetric",
        "units that start identical",
        "The network behaves as if each layer had one unit.",
        "Rows of a weight are equal at the start and stay equal after updates, since equal units get equal gradients.",
        "init.too-small model.dead-units lr.too-low",
        "Initialise weights at random; zeros are right for biases only, and for the last layer of a branch.",
        "Look for `zeros_`, `ones_` or `constant_` on weights, or a checkpoint of zeros.",
    ),
    # ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "model.dead-units",
        "units that are always zero",
        "Part of a layer is silent, and the model is smaller than it looks.",
        "Units put out exactly 0 on every input, and so their gradient is exactly 0 as well.",
        "lr.too-high init.symmetric optim.frozen-parameters",
        "Lower the learning rate: one large step is what usually kills them.",
        "Use LeakyReLU, GELU or SiLU.",
        "Initialise again, with biases at 0, and put a normalisation layer before the activation.",
        cured_by={"lr-3": "Lower the learning rate", "lr-10": "Lower the learning rate"},
    ),
    _cause(
        "model.saturated-units",
        "activations at their bounds",
        "Learning is slow, more so in the early layers.",
        "Most outputs of a sigmoid or tanh lie at its bounds, where its slope is nearly 0.",
        "model.vanishing-gradient data.unscaled-input init.too-large",
        "Standardise the inputs and initialise by Xavier's rule.",
        "Normalise before the activation.",
        "Use ReLU or GELU instead.",
    ),
    _cause(
        "model.vanishing-gradient",
        "gradients vanish towards the early layers",
        "Early layers stay as they were while the last ones learn.",
        "The gradient of the first layers is many orders smaller than that of the last, although activations have a "
        "healthy scale at the start.",
        "init.too-small model.saturated-units optim.frozen-parameters",
        "Use ReLU-like activations and an initialisation that fits them.",
        "Add normalisation layers.",
        "Add residual connections; for sequences use gates (LSTM, GRU) or attention.",
        "Use fewer layers.",
        cured_by={"smaller-model": "Use fewer layers"},
    ),
    _cause(
        "model.exploding-gradient",
        "gradients explode towards the early layers",
        "Spikes, then NaN, more often on long sequences or in deeper models.",
        "The gradient grows with depth or with sequence length, while the learning rate is ordinary.",
        "lr.too-high init.too-large data.bad-batch",
        "Clip the gradient norm at 1.0.",
        "Initialise recurrent weights as orthogonal matrices, or shorten the stretch that is propagated through.",
        "Use gates, residual connections or normalisation, or fewer layers.",
        cured_by={"clip": "Clip the gradient norm at 1.0", "smaller-model": "fewer layers"},
    ),
    _cause(
        "model.batchnorm-tiny-batch",
        "BatchNorm over too few values",
        "Training looks good and evaluation bad, even on the training data.",
        "Each mean and variance of a BatchNorm is taken over four values or fewer, so the running statistics used in "
        "evaluation do not resemble those used in training.",
        "data.split-mismatch model.train-mode-eval data.leakage",
        "Use larger batches, and drop a last batch that is nearly empty (`drop_last=True`).",
        "Replace BatchNorm by GroupNorm or LayerNorm.",
        "Synchronise statistics across ranks (`SyncBatchNorm`).",
    ),
    _cause(
        "model.eval-mode-training",
        "training in eval mode",
        "Dropout does nothing and BatchNorm's running statistics never move.",
        "`training` is False on a step that updates weights, usually since an evaluation that did not switch back.",
        "model.train-mode-eval model.batchnorm-tiny-batch",
        "Call `model.train()` before each training epoch, not once at the start.",
        "Wrap evaluation in a function that restores the mode.",
    ),
    _cause(
        "model.train-mode-eval",
        "evaluating in train mode",
        "Evaluation is noisy, differs from run to run and is worse than it should be.",
        "Passes without gradients run with dropout on, or with BatchNorm using (and updating) batch statistics.",
        "model.eval-mode-training data.split-mismatch model.batchnorm-tiny-batch",
        "Call `model.eval()` before evaluation and `model.train()` after it.",
        "`torch.no_grad()` does not do this: it turns off gradients and nothing else.",
    ),
    _cause(
        "model.unregistered-parameters",
        "parameters that no module registers",
        "Part of the model never learns, and is missing from its checkpoints.",
        "Leaf tensors that require a gradient take part in the loss, but appear in no `named_parameters()`.",
        "optim.parameters-missing optim.detached-graph optim.frozen-parameters",
        "Hold submodules in `nn.ModuleList` or `nn.ModuleDict`, not in a Python list or dict.",
        "Wrap bare tensors in `nn.Parameter` and assign them to the module.",
        "Build the optimizer after that, so that it is given all of them.",
    ),
    _cause(
        "model.attention-logit-growth",
        "attention logits grow",
        "A transformer trains well for a long time, then diverges.",
        "The largest attention logit climbs steadily and the entropy of the heads falls, well before the loss shows "
        "anything.",
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
        "The loss diverges, oscillates, or stalls for good after a blow-up.",
        "Everything is normal at step 0, and updates are large against the weights before the loss moves; with a "
        "tenth of the rate the same batches are learnt.",
        "init.too-large data.unscaled-input loss.sum-reduction lr.no-warmup",
        "Divide the rate by 3 to 10; `surefoot.find_lr` finds where it breaks.",
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
        "The loss crawls along an almost straight line.",
        "Gradients are steady, updates are a tiny share of the weights, and with ten times the rate the same batches "
        "are learnt much faster and safely.",
        "optim.no-update optim.epsilon clip.saturated precision.low-precision-weights",
        "Multiply the rate by 3 to 10; `surefoot.find_lr` suggests one.",
        "Check that the schedule has not already decayed it.",
        "With SGD, add momentum or switch to AdamW.",
    ),
    _cause(
        "lr.no-warmup",
        "full rate from the first step",
        "A transformer, or anything under Adam, blows up in its first steps and never recovers.",
        "Updates are too large only at the start: with a lower rate for the first steps alone, the same peak rate "
        "works.",
        "lr.too-high init.too-large optim.epsilon",
        "Warm up over the first 1 to 5 % of the steps (`surefoot.warmup_cosine`).",
        "Use pre-norm blocks, which need it less.",
        cured_by={"warm-up": "Warm up"},
        must_cure=("warm-up",),
    ),
    _cause(
        "lr.schedule-broken",
        "the learning rate is not what was planned",
        "Learning stops early, or the loss jumps at steps that nobody planned.",
        "The trace of the rate itself: it reaches 0 long before the end, jumps, or rises again after its decay.",
        "lr.too-low lr.too-high resume.state-missing",
        "Print the rate over the planned steps before training.",
        "Call `scheduler.step()` once per step or once per epoch, whichever its length was counted in.",
        "Save and restore the scheduler with the rest of the state.",
    ),
    # ── optim ────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "optim.missing-zero-grad",
        "gradients are never cleared",
        "The gradient norm grows step by step and the loss wanders or diverges.",
        "The gradient at a step equals the one of the step before plus the fresh one.",
        "lr.too-high accum.not-divided model.exploding-gradient",
        "Call `optimizer.zero_grad()` once per step, before `backward()`.",
        "Check that it is called on the optimizer, or the model, that owns these parameters.",
    ),
    _cause(
        "optim.no-update",
        "steps that change nothing",
        "The loss is flat, exactly the same on the same batch.",
        "Gradients exist and the optimizer is there, but parameters stay bit for bit as they were: the step is never "
        "called, or gradients are cleared between `backward()` and `step()`.",
        "lr.too-low optim.parameters-missing precision.scaler-stuck",
        "Order the loop: `zero_grad()`, forward, `backward()`, `step()`.",
        "Check that the optimizer holds the parameters of this model, and not of one that was replaced or copied.",
        "Check that the learning rate is not 0.",
    ),
    _cause(
        "optim.parameters-missing",
        "parameters in no optimizer",
        "Part of the model never learns.",
        "Parameters receive a gradient at every step, but belong to no optimizer.",
        "optim.frozen-parameters model.unregistered-parameters optim.no-update",
        "Pass `model.parameters()`, or add a group for the missing ones with `add_param_group`.",
        "Build the optimizer after the last layer is added or replaced.",
        "If they are meant to stay, set `requires_grad_(False)` and save the work.",
    ),
    _cause(
        "optim.frozen-parameters",
        "parameters frozen by accident",
        "It barely learns, like a linear model on fixed features.",
        "Most parameters have `requires_grad=False` although the optimizer was given them.",
        "optim.parameters-missing optim.detached-graph lr.too-low",
        "Call `requires_grad_(True)` on what should learn.",
        "If freezing is meant, give the optimizer only the rest, so that the intention can be read.",
    ),
    _cause(
        "optim.detached-graph",
        "part of the model is detached from the loss",
        "Part of the model never learns, or `backward()` says that nothing requires a gradient.",
        "A parameter requires a gradient and takes part in the forward, but its gradient is None: something between "
        "it and the loss left the graph.",
        "optim.frozen-parameters model.unregistered-parameters optim.no-gradient",
        "Look for `.detach()`, `.data`, `.item()`, `.numpy()`, `torch.tensor(...)` or `no_grad()` on the way to the "
        "loss.",
        "Replace `argmax`, rounding and indexing by something differentiable, such as a softmax.",
    ),
    _cause(
        "optim.stale-state",
        "moments of other parameters",
        "The loss jumps after a resume, a change of layers or a swap of weights.",
        "The moments in the optimizer do not match the parameters in shape, age or scale.",
        "resume.state-missing lr.schedule-broken lr.too-high",
        "Restore the optimizer from the same checkpoint as the model.",
        "If the weights were changed on purpose, clear the state of these parameters and warm up again.",
        cured_by={"reset-moments": "clear the state"},
    ),
    _cause(
        "optim.epsilon",
        "epsilon of the wrong size",
        "Updates are tiny everywhere, or are pure noise where gradients are small.",
        "Adam's eps exceeds the root of its second moment for most entries; or it is so small that noise is divided "
        "up to full steps.",
        "lr.too-low clip.saturated precision.fp16-underflow",
        "Set eps near the low end of the root of the second moment; 1e-8 is the usual start.",
        "In half precision do not go under 1e-7, which rounds to 0 in fp16.",
        "Scale the loss up if gradients are tiny by nature.",
        cured_by={"eps": "Set eps"},
        must_cure=("eps",),
    ),
    _cause(
        "optim.weight-decay",
        "weight decay too strong",
        "Weights shrink steadily and the loss stops at a floor.",
        "Weight norms fall at every step, and the update by decay is larger than the one by the gradient.",
        "lr.too-low init.too-small model.vanishing-gradient",
        "Lower the weight decay.",
        "Leave biases and normalisation gains out of it (`surefoot.decay_groups`).",
        "Use AdamW, whose decay does not pass through the moments.",
    ),
    _cause(
        "optim.not-learning",
        "nothing was learned",
        "The loss stays flat, or ends no lower than always giving the same answer would.",
        "The loss ends at or above that of the best constant answer (the entropy of the labels, the variance of the "
        "targets), it is not falling any more, and no other cause explains it. The size of the updates and gradients "
        "of 0 say where to look.",
        "data.labels-uninformative lr.too-low optim.no-update model.dead-units loss.softmax-before-cross-entropy",
        "Run `surefoot doctor` on the script: it tries other learning rates and one small batch on copies.",
        "Train on 16 rows until they are known by heart. If that fails, the fault is in the model or the loss; if it "
        "works, it is in the data.",
        "Print inputs, targets and outputs of one batch right before the loss, with their shapes.",
    ),
    _cause(
        "optim.no-gradient",
        "a step without any gradient",
        "The optimizer steps and nothing at all happens.",
        "Not one parameter of the optimizer has a gradient when the step comes: `backward()` was not called, or "
        "reached other parameters.",
        "optim.detached-graph optim.no-update optim.parameters-missing",
        "Call `backward()` on the loss before the step, and clear gradients after the step and not between.",
        "Check that the optimizer holds the parameters the loss depends on.",
    ),
    _cause(
        "optim.lost-microbatch",
        "a microbatch was dropped",
        "With accumulation the result depends on how the batch is cut up.",
        "Gradients changed or disappeared between two `backward()` calls of the same step, so a part of the batch "
        "never reached the weights.",
        "accum.not-divided accum.uneven-microbatches optim.no-gradient",
        "Clear gradients once per optimizer step, not once per microbatch.",
        "Leave clearing to the stabilizer, which does it when the window is complete.",
    ),
    # ── eval ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "eval.random-eval",
        "evaluation is random",
        "Validation is noisy or worse than training, and differs between two evaluations of the same weights.",
        "A call that drops at random is active in evaluations, although the dropout modules of the model are switched "
        "off: a functional dropout without `training=`, or attention with a fixed `dropout_p`.",
        "model.train-mode-eval data.split-mismatch",
        "Pass `training=self.training` to the functional dropout, and call `model.eval()` before evaluating.",
        "Use `nn.Dropout`, which `model.eval()` switches off.",
    ),
    _cause(
        "eval.labels-mismatched",
        "evaluation labels belong to other rows",
        "Validation stays at the level of a guess while training goes well.",
        "The inputs of both splits are alike, training labels can be foretold from similar rows, and the labels of the "
        "evaluation rows cannot: neither by the model nor by the most similar training rows.",
        "data.split-mismatch data.labels-uninformative model.train-mode-eval",
        "Join inputs and labels of the evaluation split again by key, not by position.",
        "Print a few evaluation rows with their labels and look.",
    ),
    # ── clip ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "clip.saturated",
        "every step is clipped",
        "Learning is slow, and the same whether the gradient is large or small.",
        "Nearly every step is clipped, and by far: the limit has become the learning rate.",
        "lr.too-low optim.epsilon model.exploding-gradient",
        "Raise the limit to the 95th percentile of the norms (`surefoot.build.clip_advice`).",
        "If norms are large for a reason, cure it: data scale, initialisation, sum instead of mean.",
    ),
    _cause(
        "clip.before-unscale",
        "clipping scaled gradients",
        "The learning rate seems to mean nothing, and changing the clip limit changes nothing sensible.",
        "The clip saw gradients still multiplied by the loss scale, so it cut every one of them down.",
        "clip.saturated precision.fp16-underflow lr.too-low",
        "Call `scaler.unscale_(optimizer)` before clipping.",
        "Or let the stabilizer do both in the right order.",
    ),
    # ── accum ────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "accum.not-divided",
        "accumulated loss not divided",
        "With k microbatches it behaves as with a k times higher learning rate.",
        "There are k backwards per step, and the gradient is their sum, not their mean.",
        "lr.too-high loss.sum-reduction optim.missing-zero-grad",
        "Divide each loss by k before `backward()`.",
        "Or give `accumulate=k` to the stabilizer.",
    ),
    _cause(
        "accum.uneven-microbatches",
        "microbatches of unequal size",
        "The same batch gives another loss when it is cut up differently.",
        "Means over microbatches of different numbers of rows or tokens are averaged as if they were equal.",
        "accum.not-divided optim.lost-microbatch",
        "Weight each microbatch by its count: `stabilizer.backward(loss, weight=tokens)`.",
        "Sum over the tokens, and divide once by the count of the whole step.",
        "Use microbatches of equal size, and drop the rest.",
    ),
    # ── precision ────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "precision.fp16-overflow",
        "numbers beyond fp16",
        "Inf or NaN appear in mixed precision, and the loss scale falls.",
        "The first Inf is in an fp16 tensor whose value would exceed 65504; the same step in float32 is finite.",
        "loss.undefined-op mask.fully-masked-row model.exploding-gradient",
        "Use bf16, which reaches as far as float32.",
        "Compute this operation in float32: cast before it, or turn autocast off around it.",
        "Find out why the value is large: sums over long axes, squares and attention logits are the usual ones.",
        cured_by={"bf16": "Use bf16", "fp32": "in float32"},
        must_cure=("fp32",),
    ),
    _cause(
        "precision.fp16-underflow",
        "gradients rounded to zero",
        "Training in fp16 stalls where float32 goes on.",
        "A large share of the entries of fp16 gradients is exactly 0, and is not in float32.",
        "lr.too-low model.vanishing-gradient model.dead-units",
        "Scale the loss with `GradScaler`, or give `precision='fp16'` to the stabilizer.",
        "Use bf16, which has the range of float32.",
        cured_by={"bf16": "Use bf16", "fp32": "range of float32"},
        must_cure=("fp32",),
    ),
    _cause(
        "precision.low-precision-weights",
        "updates too small for the weights' format",
        "Training stalls although gradients and learning rate are sensible.",
        "Weights are kept in half precision, and most entries are the same bit for bit after a step whose update was "
        "not 0: it was under half a unit in the last place.",
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
        "Every step is skipped, and the loss stays where it is.",
        "The scale is at its floor and each step is still found to overflow: scaling is not the reason for the Inf.",
        "precision.fp16-overflow data.nonfinite-input loss.undefined-op",
        "Run one step in float32 and find the first non-finite tensor.",
        "Use bf16 and drop the scaler.",
        cured_by={"bf16": "Use bf16", "fp32": "in float32"},
        must_cure=("fp32",),
    ),
    # ── memory, dist, resume, repro ──────────────────────────────────────────────────────────────────────────────────
    _cause(
        "memory.graph-retained",
        "old graphs are kept alive",
        "Memory grows at every step until it runs out, or `backward()` complains about a second pass.",
        "The number of live tensors with a graph grows by the same amount each step: something keeps a tensor of "
        "every step together with all that led to it.",
        "data.repeated-batches",
        "Keep numbers, not tensors: `total += loss.item()`, or `loss.detach()` to avoid a sync.",
        "Detach the state that is carried from batch to batch: `h = h.detach()`.",
        "Do without `retain_graph=True`.",
    ),
    _cause(
        "dist.replicas-diverged",
        "ranks hold different weights",
        "Nothing is seen, until the checkpoint of one rank behaves differently from another's.",
        "Hashes of the parameters differ between ranks at the same step.",
        "dist.gradients-not-averaged repro.unseeded hw.silent-corruption",
        "Broadcast the parameters from rank 0 at the start, which DDP does.",
        "Look for parameters changed outside the optimizer, or on one rank only.",
        "Check that each rank takes the same steps: one that skips a step alone drifts away.",
    ),
    _cause(
        "dist.gradients-not-averaged",
        "gradients are not averaged over the ranks",
        "More GPUs do not help, and the ranks drift apart.",
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
        "Agree on overflow before the step: the largest `found_inf` over all ranks.",
        "Use bf16, which needs no scale.",
    ),
    _cause(
        "dist.config-disagrees",
        "ranks run with different settings",
        "The ranks drift apart, or one of them behaves differently from the others.",
        "Learning rate, optimizer, code, number of rows or versions differ between ranks that train one model.",
        "dist.replicas-diverged dist.scale-disagrees dist.gradients-not-averaged",
        "Set learning rate and optimizer from one configuration, without a condition on the rank.",
        "Start every rank from the same checkout, the same environment and the same copy of the data.",
        "Step the scheduler on every rank, and with the same number: reduce a metric over the ranks first.",
    ),
    _cause(
        "dist.collective-failed",
        "ranks could not communicate",
        "`DistBackendError: NCCL error`, a timeout of a collective, or a connection that another rank closed.",
        "The error of NCCL or gloo itself, with the kind and the reason that it gives.",
        "device.out-of-memory device.illegal-access",
        "Look at the output of the rank that failed first: the others only saw it leave.",
        "Run once with the environment variable `NCCL_DEBUG=INFO`, which prints what NCCL was doing.",
        "Check that all ranks make the same collective calls in the same order, with the same number of batches.",
    ),
    _cause(
        "resume.state-missing",
        "a restart without part of the state",
        "The loss jumps at a restart and takes a long time to return.",
        "Parameters continue where they were, while moments, schedule or loss scale start over.",
        "optim.stale-state lr.schedule-broken resume.data-replayed",
        "Save and load optimizer, scheduler and scaler together with the model.",
        "Test it: a run of 20 steps must equal one of 10 that is stopped, restarted and run for 10 more.",
        "If the state is lost, warm up again.",
        cured_by={"warm-up": "warm up again"},
    ),
    _cause(
        "resume.data-replayed",
        "a restart repeats old batches",
        "The training loss is falsely low after a restart.",
        "Fingerprints of the batches after it were seen before it, in the same epoch.",
        "data.repeated-batches data.leakage resume.state-missing",
        "Save the position of the data with the checkpoint, and skip to it.",
        "Use a loader with state, such as torchdata's `StatefulDataLoader`.",
        "At least seed the order with the epoch or the step.",
    ),
    _cause(
        "repro.unseeded",
        "runs differ from each other",
        "The same command gives another result each time.",
        "No seed was set before the first random number, or deterministic operations are off where they were asked "
        "for.",
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
        "The KL divergence from the old or reference policy climbs first, and the reward falls afterwards.",
        "rl.ratio-explosion lr.too-high rl.entropy-collapse",
        "Raise the KL coefficient, or stop the inner epochs once KL passes a target.",
        "Lower the learning rate.",
        "Take fewer passes over each batch of samples.",
        cured_by={"lr-3": "Lower the learning rate", "lr-10": "Lower the learning rate"},
    ),
    _cause(
        "rl.entropy-collapse",
        "the policy stops exploring",
        "The reward stops improving early and all actions look alike.",
        "The entropy of the policy goes to 0 while rewards are still far from their best.",
        "rl.zero-advantage rl.kl-blowup lr.too-high",
        "Add or raise the entropy bonus.",
        "Lower the learning rate of the policy.",
        "Clip higher upwards than downwards, so that rare actions can grow.",
        cured_by={"lr-3": "Lower the learning rate", "lr-10": "Lower the learning rate"},
    ),
    _cause(
        "rl.ratio-explosion",
        "importance ratios with a heavy tail",
        "Gradients spike on some batches of samples.",
        "A few probability ratios between new and old policy are orders of magnitude above the rest.",
        "rl.kl-blowup data.bad-batch model.exploding-gradient",
        "Clip the ratio on both sides, also for negative advantages.",
        "Use fresher samples: fewer steps between sampling and training.",
        "Check that sampler and trainer compute the same log-probabilities.",
    ),
    _cause(
        "rl.zero-advantage",
        "all samples get the same reward",
        "The policy loss is almost 0 and nothing is learnt.",
        "Advantages, or the variance of rewards within each group, are 0.",
        "rl.entropy-collapse rl.reward-scale lr.too-low",
        "Check the grouping: samples of one prompt belong to one group.",
        "Filter out tasks that are always or never solved.",
        "Give a denser reward.",
    ),
    _cause(
        "rl.reward-scale",
        "returns far from unit scale",
        "The value loss dwarfs the policy loss, and the policy hardly learns.",
        "Returns lie far from unit scale, and the value term makes up nearly all of the gradient.",
        "loss.term-dominates data.unscaled-input rl.zero-advantage",
        "Normalise rewards by a running standard deviation.",
        "Clip the value loss, or lower its coefficient.",
        "Do not share the body between policy and value.",
    ),
    _cause(
        "gan.discriminator-wins",
        "the discriminator is too good",
        "Samples stop improving and the generator's loss rises.",
        "The discriminator's loss goes to 0, and with it the gradient that reaches the generator.",
        "gan.mode-collapse model.vanishing-gradient lr.too-low",
        "Use the non-saturating or the hinge loss, and lower the discriminator's learning rate.",
        "Add a gradient penalty or spectral normalisation.",
        "Add noise or augmentation to what the discriminator sees.",
    ),
    _cause(
        "gan.mode-collapse",
        "samples all alike",
        "The generator makes the same few things over and over.",
        "The spread within a batch of samples falls far under that of the data, while the discriminator is not "
        "winning.",
        "gan.discriminator-wins rl.entropy-collapse",
        "Lower the generator's learning rate, or give the discriminator more steps.",
        "Add a gradient penalty, or let the discriminator see statistics of the whole batch.",
        "Change to a Wasserstein objective.",
    ),
    _cause(
        "device.assert",
        "a kernel failed an assertion",
        "`CUDA error: device-side assert triggered`, at a line that need not be the one that failed.",
        "The error itself, while the ids and labels of every embedding and loss that were noted on the host before "
        "do fit.",
        "data.token-mismatch data.label-out-of-range",
        "Run the script once with the environment variable `CUDA_LAUNCH_BLOCKING=1`: the traceback then names the "
        "line that failed.",
        "Run the failing step on the CPU, where torch names the index.",
        "Compare what indexes a tensor by hand with the size of that tensor.",
    ),
    _cause(
        "device.illegal-access",
        "a kernel used memory that is not its own",
        "`CUDA error: an illegal memory access was encountered`, or `misaligned address`, or `unspecified launch "
        "failure`, at a line that need not be the one that failed.",
        "The error itself, while the ids and labels of every embedding and loss that were noted on the host before "
        "do fit.",
        "device.assert hw.silent-corruption",
        "Run the script once with the environment variable `CUDA_LAUNCH_BLOCKING=1`: the traceback then names the "
        "call that failed.",
        "Run it once under `compute-sanitizer`, which names the kernel and the address.",
        "Replace the extension or the kernel by torch's own operation, and compare.",
    ),
    _cause(
        "device.out-of-memory",
        "no memory left on the accelerator",
        "`torch.OutOfMemoryError`, at the first step or after many.",
        "The error itself, with the memory that was held after the steps before: it grew with every step, or one step "
        "needs more than there is.",
        "memory.graph-retained",
        "Evaluate under `torch.no_grad()`, and keep no tensors of past steps.",
        "Split the batch: accumulate over microbatches, or use `run_microbatches` of a `TrainingStabilizer`.",
        "Recompute activations (`torch.utils.checkpoint`), or train in bf16.",
    ),
    # ── fit ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "fit.overfitting",
        "the model learns its training data by heart",
        "The training loss goes on falling while that of the validation set rises.",
        "The validation loss has a lowest point in the middle of the run and rises steadily after it by a good part "
        "of what was learned, and the training loss falls meanwhile. The finding has the step to stop at.",
        "data.split-mismatch data.leakage fit.erratic-validation fit.forgetting",
        "Stop at the step of the lowest validation loss, or use the checkpoint of that step.",
        "Add weight decay, dropout or data augmentation.",
        "Use a smaller model, or more data. If the validation accuracy still rises, the model is only too sure of its "
        "answers: label smoothing or a temperature is enough.",
    ),
    _cause(
        "fit.erratic-validation",
        "the validation loss jumps up and down",
        "Which checkpoint is best is a matter of luck.",
        "From one pass to the next the validation loss moves by a large share of all that was learned, up and down, "
        "while the training loss falls smoothly.",
        "model.train-mode-eval model.batchnorm-tiny-batch lr.too-high fit.overfitting",
        "Evaluate more rows, the same ones each time, in evaluation mode.",
        "Let the learning rate decay to 0, or evaluate an average of the weights (`torch.optim.swa_utils`).",
        "Replace BatchNorm by GroupNorm or LayerNorm: its running statistics lag behind the weights.",
    ),
    _cause(
        "fit.forgetting",
        "fine-tuning overwrites what the model knew",
        "The new task is learned, and the old one is lost.",
        "The loaded model has a low loss on a validation set before the first step. That loss rises while the training "
        "loss falls.",
        "fit.overfitting data.split-mismatch lr.too-high resume.state-missing",
        "Divide the learning rate by 10.",
        "Mix rows of the old task into the batches.",
        "Train adapters (LoRA) or the last layers alone, and keep the other parameters frozen.",
        cured_by={"lr-10": "Divide the learning rate"},
    ),
    # ── hw ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    _cause(
        "hw.silent-corruption",
        "the machine computed wrongly",
        "One spike out of nowhere, which cannot be repeated.",
        "The same step from the same state, executed again, gives another result, and deterministic operations are on.",
        "data.bad-batch repro.unseeded lr.too-high",
        "Recompute the step, and go on if the second result is sane.",
        "Run the vendor's diagnostics on this device.",
        "Take the device out of the job.",
    ),
)

CATALOGUE: dict[str, Cause] = {cause.code: cause for cause in _CAUSES}
"""Every cause by its code, family by family."""


def nearest_codes(code: str, count: int = 3) -> list[str]:
    """The codes most like one that does not exist; a part of a code finds those that contain it."""
    close = difflib.get_close_matches(code, CATALOGUE, n=count, cutoff=0.5)
    partly = [known for known in CATALOGUE if code and code.lower() in known]
    by_name = difflib.get_close_matches(code.split(".")[-1], [known.split(".")[1] for known in CATALOGUE], n=count)
    named = [known for known in CATALOGUE if known.split(".")[1] in by_name]
    return list(dict.fromkeys([*close, *partly, *named]))[:count]


def to_markdown() -> str:
    """The catalogue as a page of the documentation; `python -m surefoot.diagnose.catalogue` prints it."""
    parts = [
        "# Causes",
        f"Every cause surefoot can name, {len(CATALOGUE)} in all. A code is never renamed; `surefoot explain CODE` "
        "prints the same. This page is made from the catalogue: do not edit it by hand.",
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
        f"**Evidence.** {cause.evidence}\n\n**Fixes, from fast to invasive**\n\n{fixes}\n\n**Looks like** {look_alikes}"
    )


def _anchor(code: str) -> str:
    """The name the documentation gives a heading: dots are dropped."""
    return code.replace(".", "")


if __name__ == "__main__":
    print(to_markdown(), end="")
