"""Facts about single calls on a sampled step: tensors, loss functions, layers, activations, softmaxes, model calls.

Statistics of large tensors are taken from an even sample of their elements. `site` is always a line of the script,
`path:line`; `module` is the path of the module that was running, empty outside of every module.
"""

from __future__ import annotations

from surefoot.record.facts.codec import Facts, item


class TensorSummary(Facts):
    """Shape, type, range and moments of a tensor. Moments are over the finite values."""

    shape: list[int]
    """Its sizes."""
    dtype: str
    """Its type, without `torch.`."""
    requires_grad: bool = item("grad")
    """Whether it requires a gradient."""
    nonfinite: int | None = None
    """The number of values that are not finite; only for floating-point tensors."""
    min: float | None = None
    """The lowest finite value; only where values could be read."""
    max: float | None = None
    """The highest finite value."""
    mean: float | None = None
    """The mean; only for floating-point tensors."""
    std: float | None = None
    """The standard deviation; only for floating-point tensors."""


class CallSite(Facts):
    """A call of a torch function."""

    op: str
    """The name of the function."""
    site: str
    """The line of the script it was called from."""
    module: str
    """The module that was running."""
    index: int
    """Its place among the calls of its step."""


class SampledCall(CallSite):
    """A call of a torch function on a sampled step."""

    step: int = item(unwritten=True)
    """The step it was made in."""


class RowDistribution(Facts):
    """How close the rows of a matrix are to probabilities, and to log-probabilities."""

    rows: int
    """The number of rows."""
    classes: int
    """The number of columns."""
    min: float
    """The lowest value."""
    max: float
    """The highest value."""
    sum_error: float
    """How far the sum of a row is from 1, at most."""
    log_sum_error: float
    """How far the logarithm of the summed exponentials of a row is from 0, at most."""
    column_error: float | None = None
    """How far the columns of a batch are from (log-)probabilities: the smaller of the same two errors."""


class TokenAlignment(Facts):
    """How the labels of a loss lie against the token ids that an embedding looked up in the same step.

    Rows are sequences. Ids and labels are compared at the same position, counted from the start of the row; only labels
    that count (not the ignored one) are compared.
    """

    index: int
    """The place of the embedding among the calls of the step."""
    site: str
    """The line of the script that looked the ids up."""
    positions: int
    """The length of a row of ids."""
    same: float
    """The share of the labels that is the id at its own position."""
    following: float
    """The share of the labels that is the id one position later."""
    second: float
    """The share of the labels that is the id two positions later."""
    tail_label: int
    """The most frequent label at the end of a row."""
    tail_share: float
    """The share of the counted labels that belongs to a run of that label at the end of its row."""
    tail_elsewhere: float
    """The share of the occurrences of that label that lies outside of these runs."""
    tail_lengths: int
    """How many different lengths these runs have."""
    tail_padded: float
    """At which share of their positions, but for the first of each run, the ids are one constant, too."""
    agreement: float | None = None
    """How often two labels whose own and previous ids are the same agree; of some thousand labels at most."""
    agreement_shuffled: float | None = None
    """The same with shuffled labels, on average."""
    agreement_spread: float | None = None
    """The standard deviation of the latter."""
    crossed: float | None = None
    """How much larger the share of labels that are the following id is if rows and columns of the labels are swapped;
    of labels in one dimension."""
    outputs_follow: float | None = None
    """How much less the outputs of equal ids differ than after shuffling, in spreads of the latter: whether outputs are
    in the order of the ids."""


class LossCall(SampledCall):
    """A call of a loss function."""

    trained_on: bool = item("grad")
    """Whether its result requires a gradient."""
    reduction: str
    """How elements become a loss: `mean`, `sum`, `none`, `batchmean`."""
    input: TensorSummary
    """The predictions."""
    target: TensorSummary
    """The targets."""
    producer: CallSite | None = item(null=True)
    """The call that made the predictions, looking through views."""
    same_shape: bool
    """Whether predictions and targets have the same shape."""
    value: float | None = item(null=True)
    """The loss, if it is a scalar."""
    target_from_model: bool
    """Whether the targets were computed by a layer."""
    distribution: RowDistribution | None = None
    """The predictions as probabilities; of classification losses, `kl_div` and `ctc_loss`."""
    inside_unit: float | None = None
    """Which share of the predictions lies between 0 and 1; of binary losses."""
    ignore_index: int | None = None
    """The label that is left out; only for classification losses."""
    weighted: bool | None = None
    """Whether classes or elements have weights; only for classification and binary losses."""
    smoothing: float | None = None
    """The label smoothing; only for classification losses."""
    valid: int | None = None
    """The number of labels that are not the ignored one; only for classification losses with integer targets."""
    targets: int | None = None
    """The number of labels; only for classification losses with integer targets."""
    labels: dict[str, int] | None = None
    """How often each label occurs; `None` if there are too many kinds."""
    predicted_share: float | None = None
    """The share of the predictions that is above the threshold; only for binary losses."""
    label_range: tuple[int, int] | None = None
    """The lowest and the highest label; only for classification losses."""
    predicted: dict[str, int] | None = None
    """How often each class is predicted; only for classification losses."""
    accuracy: float | None = None
    """The share of the predictions that is right; only for classification losses."""
    unit_spread: float | None = item(beside="accuracy")
    """The standard deviation of each output over the batch, on average; only for classification losses."""
    above: float | None = None
    """The share of the targets that is above every prediction; only for distance losses."""
    below: float | None = None
    """Which share of the targets is below every prediction; of distance losses."""
    target_variance: float | None = None
    """The variance of the targets over the batch, on average; of distance losses."""
    constant_loss: float | None = None
    """The loss of the best constant answer for the targets of the batch; of distance losses but `mse_loss`, and of
    binary losses with several targets per row."""
    tokens: list[TokenAlignment] | None = None
    """The embeddings whose ids have the layout of the labels, at most three; of classification losses."""


class DifferenceCall(SampledCall):
    """A prediction minus a target, as in a loss that is written by hand."""

    input: TensorSummary
    """The prediction: the operand with a gradient."""
    target: TensorSummary
    """The operand without one."""
    grown: bool
    """Whether broadcasting gave the difference more elements than either operand has."""
    producer: CallSite | None = item(null=True)
    """The call that made the prediction, looking through views."""
    target_history: list[str]
    """The functions the target was made by."""
    above: float
    """The share of the targets that is above every prediction."""
    below: float
    """The share of the targets that is below every prediction."""


class LayerCall(SampledCall):
    """A call of a linear, convolutional or recurrent layer."""

    parameter: int | None = item(null=True)
    """The number of its weight."""
    in_std: float | None = item(null=True)
    """The standard deviation of its input."""
    fan_in: int | None = item(null=True)
    """How many inputs each output adds up."""
    in_mean: float | None = item(null=True)
    """The mean of its input."""
    out_std: float | None = item(null=True)
    """The standard deviation of its output."""
    out_largest: float
    """The largest absolute output."""
    input_requires_grad: bool = item("in_grad")
    """Whether its input requires a gradient."""
    dtype: str
    """The type of its output."""
    trained_on: bool = item("grad")
    """Whether its output requires a gradient."""
    repeats: bool | None = None
    """Whether its input was made from its own earlier result; only of layers that were called several times."""
    time_steps: int | None = None
    """The number of steps that it runs over; only for recurrent layers."""
    sequences: int | None = item(beside="time_steps")
    """How many sequences it runs over side by side; only for recurrent layers."""
    out_mean: float | None = None
    """The mean of its output."""


class ActivationCall(SampledCall):
    """A call of an activation function."""

    std: float | None = item(null=True)
    """The standard deviation of its output."""
    trained_on: bool = item("grad")
    """Whether its output requires a gradient."""
    mean: float | None = None
    """The mean of its output."""
    largest: float | None = None
    """The largest absolute output."""
    saturated: float | None = None
    """The share of the outputs that is within 0.01 of a bound; only for sigmoid and tanh."""
    units: int | None = None
    """The number of units; only for ReLU and similar functions."""
    dead: int | None = None
    """The number of units that are 0 for the whole batch; only for ReLU and similar functions."""
    rows: int | None = None
    """How many outputs of each unit were seen; only for ReLU and similar functions."""
    dead_units: list[int] | None = None
    """Which units are 0 for the whole batch, at most 4096; only for ReLU and similar functions."""


class DropoutCall(SampledCall):
    """A call that drops a part of its input at random."""

    p: float
    """The probability with which an element is dropped."""


class EmbeddingCall(SampledCall):
    """A look-up in an embedding table."""

    rows: int
    """The number of rows of the table."""
    lowest: int
    """The lowest id."""
    highest: int
    """The highest id."""


class SoftmaxCall(SampledCall):
    """A call of softmax, log-softmax or scaled dot-product attention."""

    shape: list[int]
    """The shape of its input; of attention, of the queries."""
    trained_on: bool | None = item("grad", default=None)
    """Whether its output requires a gradient; only for softmax."""
    fully_masked_rows: int
    """The number of rows that have every entry masked."""
    largest: float | None = item(null=True)
    """The largest absolute finite logit."""
    is_distribution: bool | None = None
    """Whether its input already is one; only for softmax."""
    entropy: float | None = None
    """The mean entropy of a row of the result, in nats."""
    producer: CallSite | None = item(beside="is_distribution")
    """The call that made its input; only for softmax."""
    attends: bool | None = None
    """Whether its result weighs values, as in attention."""


class KeyMaskCall(SampledCall):
    """Attention whose mask keeps the keys of a single id only, at an end of each row: the padding."""

    kept_id: int
    """The id of the keys that are kept."""
    kept: int
    """How many keys are kept, over the rows compared."""
    ignored: int
    """How many keys are ignored."""


class ProductCall(SampledCall):
    """A log-probability times something without a gradient: an advantage, or a target."""

    history: list[str]
    """The functions of log-probabilities that the operand with a gradient was made by."""
    other: TensorSummary
    """The operand without a gradient."""
    other_binary: bool
    """Whether all its values are 0 or 1."""
    negated: bool | None = None
    """Whether the sign of the log-probability was changed before; `None` if it is not known."""
    bounded_by: str | None = None
    """`minimum` or `maximum`, if the loss uses the smaller or the larger of this and another product."""
    uncentred: TensorSummary | None = None
    """The operand without a gradient as it was before its mean was subtracted, if that was observed."""


class OverlapCall(SampledCall):
    """A probability times a target, whose sum is divided by the sums of both: Dice, or intersection over union."""

    ratio_site: str
    """The line of the division."""
    binary: bool
    """Whether all targets are 0 or 1."""


class RatioCall(SampledCall):
    """The exponential of a difference of log-probabilities: an importance ratio."""

    largest: float
    """The largest ratio."""
    mean: float
    """The mean ratio."""
    kl: float
    """An estimate of the KL divergence between the two policies."""
    count: int
    """The number of ratios."""


class RiskyCall(SampledCall):
    """A call of an operation that, or whose derivative, is not defined everywhere."""

    highest: float | None = item(null=True)
    """The highest value."""
    nearest_zero: float | None = item(null=True)
    """The smallest absolute value."""
    sides: int | None = None
    """How many of its tensors require a gradient; only of functions that compare two."""
    at_floor: float | None = None
    """The share of its values that is the lowest of them; only of logarithms of what `clamp` returned."""


class NormalizationCall(SampledCall):
    """A call of a normalization layer."""

    shape: list[int]
    """The shape of its input."""
    trained_on: bool = item("grad")
    """Whether its output requires a gradient."""
    training: bool | None = None
    """Whether statistics of the batch are used; only for batch norm."""
    per_statistic: int | None = None
    """How many values each statistic is taken from; only for batch norm."""


class FoldedIdsCall(SampledCall):
    """Integer ids that were forced into a range, as by `clamp`."""

    changed: float
    """The share of the ids that was changed."""
    highest: int
    """The highest id before."""
    kept: int
    """The highest id after."""
    source: CallSite | None = item(null=True)
    """The call that made the ids."""


class OverflowCall(SampledCall):
    """A half-precision result beyond its range, from finite operands."""

    infinite: int
    """The number of results that are infinite."""
    of: int
    """The number of results."""
    largest_in: float
    """The largest absolute operand."""


class RowOrder(Facts):
    """A permutation that rows were picked by."""

    length: int
    """Its length."""
    fingerprint: int = item("print")
    """A number that equal permutations share."""
    number: int
    """Which permutation of the run it is."""


class SampledCalls(Facts):
    """The calls of one sampled step, at most 200 of each kind."""

    losses: list[LossCall] = item(factory=list)
    """Loss functions."""
    differences: list[DifferenceCall] = item("errors", factory=list)
    """Predictions minus targets."""
    layers: list[LayerCall] = item(factory=list)
    """Layers with weights."""
    activations: list[ActivationCall] = item(factory=list)
    """Activation functions."""
    embeddings: list[EmbeddingCall] = item(factory=list)
    """Look-ups in embedding tables."""
    dropouts: list[DropoutCall] = item(factory=list)
    """Calls that drop a part of their input at random."""
    softmaxes: list[SoftmaxCall] = item(factory=list)
    """Softmaxes and attention."""
    key_masks: list[KeyMaskCall] = item(factory=list)
    """Attention that sees nothing but the padding."""
    products: list[ProductCall] = item(factory=list)
    """Log-probabilities that are weighted."""
    single_products: list[ProductCall] = item(factory=list)
    """Log-probabilities that are weighted by a single number each, as in a loop over the steps of an episode."""
    overlaps: list[OverlapCall] = item(factory=list)
    """Overlaps of predictions and targets."""
    ratios: list[RatioCall] = item(factory=list)
    """Importance ratios."""
    risky: list[RiskyCall] = item(factory=list)
    """Operations that are not defined everywhere."""
    normalizations: list[NormalizationCall] = item("norms", factory=list)
    """Normalization layers."""
    folded_ids: list[FoldedIdsCall] = item(factory=list)
    """Ids that were forced into a range."""
    overflows: list[OverflowCall] = item(factory=list)
    """Half-precision results beyond their range."""
    orders: list[RowOrder] = item(factory=list)
    """Permutations that rows were picked by."""


class FeatureScales(Facts):
    """Mean and spread of each feature of a batch, at most 64 of them."""

    count: int
    """The number of rows."""
    mean: list[float]
    """The mean of each feature."""
    std: list[float]
    """The standard deviation of each feature."""


class ModelCall(Facts):
    """A call of a model: what went in, what came out, and in which mode it ran."""

    model: str
    """The name of the model."""
    step: int
    """The step it was made in."""
    trained_on: bool = item("grad")
    """Whether an output requires a gradient."""
    grad_mode: bool
    """Whether gradients were enabled."""
    training: bool
    """Whether the model was in training mode."""
    site: str
    """The line of the script that called it."""
    inputs: list[TensorSummary]
    """The first four inputs."""
    outputs: list[TensorSummary]
    """The first four outputs."""
    autocast: str | None = item(null=True)
    """The type that autocast used, if it was on."""
    index: int | None = item(null=True)
    """Its place among the calls of the step; `None` where calls were not recorded."""
    dropouts: int
    """How many parts drop something."""
    dropouts_on: int
    """How many of them are in training mode."""
    batchnorms: int
    """How many batch norms keep running statistics."""
    batchnorms_on: int
    """How many of them are in training mode."""
    batchnorms_frozen: int
    """How many of them have no parameter that is trained."""
    rows: list[int] | None = None
    """A fingerprint of each row of the first input, at most 256; of a larger evaluation, evenly spaced rows."""
    features: FeatureScales | None = item(beside="rows")
    """Mean and spread of each feature of the first input."""
    reached: bool | None = None
    """Whether a `backward` of the step went through an output; only of calls with gradients, where graphs were read."""
    row_spread: float | None = None
    """How much the directions of the rows of the first output differ, from 0 to 1; only of training, for matrices."""
    samples: list[list[list[float]] | None] | None = None
    """A few rows of the first input and the first output; only where several optimizers work."""
    block: int | None = None
    """Which block without gradients it was made in; only between steps."""
    block_calls: int | None = item("block_passes", default=None)
    """The number of calls in that block; only between steps."""
