"""Names of torch functions, as the recorder writes them, grouped by what they do."""

from __future__ import annotations

CLASS_LOSSES = {"cross_entropy", "nll_loss", "nll_loss2d"}
BINARY_LOSSES = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
DISTANCE_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
OTHER_LOSSES = {
    "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "ctc_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_embedding_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss",
}  # fmt: skip
CHOICES = {"argmax", "max", "topk"}
"""Calls whose integer results are the classes that a model chooses."""
COMPARISONS = {"eq", "__eq__"}
SIMILARITIES = {"cosine_similarity", "pairwise_distance", "cdist"}
"""Functions that compare the rows of two tensors."""
DECISIONS = {"gt", "ge", "lt", "le", "eq", "ne", "argmax", "argmin", "argsort", "bool", "long", "int", "heaviside"}
"""Functions whose results never have a gradient, although they are computed from the values of their input.

Functions that use only its shape, such as `randn_like`, cut nothing off.
"""
STEP_FUNCTIONS = {"round", "round_", "floor", "floor_", "ceil", "ceil_", "trunc", "trunc_", "fix", "sign", "sgn"}
"""Functions whose results have a gradient that is 0 everywhere."""
DRAWS = {"normal"}
"""Draws from a distribution whose results have no gradient for its parameters, or one of 0."""
LOSSES = CLASS_LOSSES | BINARY_LOSSES | DISTANCE_LOSSES | OTHER_LOSSES

ADDED_PRODUCTS = {"addmm", "addmv", "baddbmm", "addbmm"}
"""Products of the second and third argument, to which the first is added."""
PRODUCTS = {"matmul", "mm", "mv", "bmm", "einsum", "__rmatmul__"} | ADDED_PRODUCTS
WEIGHT_LAYERS = PRODUCTS | {
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "bilinear",
}  # fmt: skip
ARITHMETIC = WEIGHT_LAYERS | {"mul", "add", "sub", "div", "pow", "exp", "sum", "square", "prod", "cumsum", "norm"}
ACTIVATIONS = {
    "relu", "relu_", "leaky_relu", "elu", "gelu", "silu", "sigmoid", "sigmoid_", "tanh", "tanh_", "hardtanh",
    "softplus", "relu6", "hardswish", "mish", "selu", "threshold", "clamp_min", "clamp",
}  # fmt: skip
DROPOUTS = {
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "scaled_dot_product_attention",
}  # fmt: skip
"""Calls that may drop a part of their input at random."""
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}

VIEWS = {
    "view", "reshape", "squeeze", "unsqueeze", "flatten", "permute", "transpose", "contiguous", "getitem", "float",
    "to", "type", "double", "half", "bfloat16", "expand", "expand_as", "view_as", "t", "T", "mT", "movedim", "clone",
    "swapaxes", "ravel", "unflatten", "narrow", "select", "requires_grad_", "detach", "type_as", "squeeze_", "chunk",
    "split", "unbind", "stack", "cat", "long",
}  # fmt: skip
"""Calls that return their values unchanged."""

RISKY = {
    "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "div", "norm", "pow", "acos", "asin", "acosh", "atanh", "exp",
    "expm1", "reciprocal", "std", "var", "normalize", "cosine_similarity", "cdist", "where", "logit", "logsumexp",
    "cumprod", "prod", "tan", "erfinv", "atan2", "lgamma", "digamma", "linalg_inv", "inverse", "cholesky",
    "linalg_cholesky", "slogdet", "logdet", "pairwise_distance", "dist", "std_mean", "softmax",
}  # fmt: skip
"""Operations that are not defined for all values, or whose derivative is not."""
PARTIAL = (RISKY - {"where", "softmax", "cdist", "dist"}) | {
    "rdiv",
    "rpow",
    "mean",
    "var_mean",
    "median",
    "log_softmax",
}
"""Operations that can return non-finite values for finite inputs, such as the mean of an empty tensor."""
