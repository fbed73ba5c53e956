"""Setups with one fault each, and the cause that must be named."""

import torch
import torch.nn.functional as F
from torch import nn

from doctor_healthy import TinyGPT, build, clusters, loader_of


def adam(model, lr=1e-3):
    return torch.optim.Adam(model.parameters(), lr=lr)


def classifier(*after, first=16, classes=4):
    return nn.Sequential(nn.Linear(first, 64), nn.ReLU(), nn.Linear(64, classes), *after)


def on_clusters(model, loss_fn=None, optimizer=None, change=lambda x, y: (x, y)):
    x, y = change(*clusters())
    return model, loader_of(x, y), loss_fn or nn.CrossEntropyLoss(), optimizer or adam(model)


def softmax_twice():
    return on_clusters(classifier(nn.Softmax(-1)))


class FunctionalSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = classifier()

    def forward(self, x):
        logits = self.body(x)
        return logits.exp() / logits.exp().sum(1, keepdim=True)


def softmax_by_hand():
    return on_clusters(FunctionalSoftmax(), F.cross_entropy)


def sigmoid_twice():
    model, loader, loss_fn, _ = build("multi_label")
    model.append(nn.Sigmoid())
    return model, loader, loss_fn, adam(model)


def single_sigmoid_twice():
    model, loader, loss_fn, _ = build("binary")
    model.append(nn.Sigmoid())
    return model, loader, loss_fn, adam(model)


def logits_into_nll():
    return on_clusters(classifier(), nn.NLLLoss())


def logits_into_bce():
    model, loader, _, optimizer = build("multi_label")
    return model, loader, nn.BCELoss(), optimizer


def negated():
    return on_clusters(classifier(), lambda prediction, y: -F.cross_entropy(prediction, y))


def broadcast():
    model, loader, loss_fn, optimizer = build("regression")
    x, y = loader.dataset.tensors
    return model, loader_of(x, y.squeeze(1)), loss_fn, optimizer


def broadcast_by_hand():
    model, loader, _, optimizer = broadcast()
    return model, loader, lambda prediction, y: ((prediction - y) ** 2).mean(), optimizer


def sigmoid_for_regression():
    x = torch.randn(512, 8)
    y = 3.0 * x[:, :1] + x[:, 1:2]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1), nn.Sigmoid())
    return model, loader_of(x, y), nn.MSELoss(), adam(model)


def label_too_large():
    return on_clusters(classifier(), change=lambda x, y: (x, y + 1))


def token_too_large():
    ids = torch.randint(40, (256, 13))
    model = TinyGPT()
    return model, loader_of(ids[:, :-1], ids[:, 1:]), nn.CrossEntropyLoss(), adam(model)


def nan_in_a_later_batch():
    model, loader, loss_fn, optimizer = build("mlp")
    x, y = loader.dataset.tensors
    x[300, 2] = torch.nan
    return model, loader_of(x, y, shuffle=False), loss_fn, optimizer


def bytes_as_floats():
    return on_clusters(classifier(), change=lambda x, y: (x * 60 + 128, y))


def rate_too_high():
    model = classifier()
    return on_clusters(model, optimizer=adam(model, 3.0))


def rate_diverges():
    model, loader, loss_fn, _ = build("regression")
    return model, loader, loss_fn, torch.optim.SGD(model.parameters(), lr=5.0)


def rate_too_low():
    model = classifier()
    return on_clusters(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6))


def rate_zero():
    model = classifier()
    return on_clusters(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))


def head_only_in_optimizer():
    model = classifier()
    return on_clusters(model, optimizer=adam(model[2]))


def optimizer_of_another_model():
    return on_clusters(classifier(), optimizer=adam(classifier()))


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(F.relu(self.body(x)).detach())


def cut_graph():
    return on_clusters(Detached())


class PythonList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(16, 64), nn.Linear(64, 64)]
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


def unregistered():
    return on_clusters(PythonList())


def all_frozen_but_a_bias():
    model = classifier()
    model.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    return on_clusters(model)


def initialised(value):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            value(layer.weight)
    return on_clusters(model)


def constant_weights():
    return initialised(lambda weight: nn.init.constant_(weight, 0.1))


def weights_too_large():
    return initialised(lambda weight: nn.init.normal_(weight, std=4.0))


def weights_too_small():
    return initialised(lambda weight: nn.init.normal_(weight, std=1e-4))


def log_of_zero():
    return on_clusters(classifier(nn.ReLU()), lambda out, y: F.nll_loss((out / out.sum(1, keepdim=True)).log(), y))


class RootOfZero(nn.Module):
    """The forward is finite; the gradient of a root at 0 is not."""

    def __init__(self):
        super().__init__()
        self.body = classifier()

    def forward(self, x):
        return self.body(x) + (F.relu(self.body[0](x)) - F.relu(self.body[0](x))).sqrt().sum(1, keepdim=True)


def root_of_zero():
    return on_clusters(RootOfZero())


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = classifier()
        self.history = []

    def forward(self, x):
        out = self.body(x)
        self.history.append(out.mean())
        return out


def keeps_graphs():
    return on_clusters(Keeps())


class Carries(nn.Module):
    """Carries its hidden state from batch to batch and never detaches it."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)
        self.state = None

    def forward(self, x):
        out, self.state = self.lstm(x.unsqueeze(1), self.state)
        return self.head(out[:, -1])


def carries_state():
    return on_clusters(Carries())


def sees_the_future():
    class Leaky(TinyGPT):
        def forward(self, ids):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            return self.head(self.body(x)).transpose(1, 2)

    _, loader, loss_fn, _ = build("transformer")
    model = Leaky()
    return model, loader, loss_fn, adam(model)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.values, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        scores = (x @ x.T).masked_fill(torch.eye(len(x)) < 2, -torch.inf)
        return self.head(scores.softmax(-1) @ self.values(x))


def masked_everywhere():
    return on_clusters(Masked())


def tiny_batch_norm():
    x, y = clusters(128)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    return model, loader_of(x, y, batch_size=2), nn.CrossEntropyLoss(), adam(model)


def half_weights():
    model = classifier().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return on_clusters(model, optimizer=optimizer, change=lambda x, y: (x.bfloat16(), y))


def sorted_labels():
    x, y = clusters()
    order = y.argsort()
    model = classifier()
    return model, loader_of(x[order], y[order], shuffle=False), nn.CrossEntropyLoss(), adam(model)


def same_batch_again():
    model, loader, loss_fn, optimizer = build("mlp")
    return model, [next(iter(loader))] * 8, loss_fn, optimizer


def unrelated_labels():
    return on_clusters(
        nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 4)),
        change=lambda x, y: (x, torch.randint(4, (512,))),
    )


def summed_loss():
    model = classifier()
    return on_clusters(model, nn.CrossEntropyLoss(reduction="sum"), torch.optim.SGD(model.parameters(), lr=0.5))


def all_ignored():
    x, y = clusters()
    y[64:96] = -100
    model = classifier()
    return model, loader_of(x, y, shuffle=False), nn.CrossEntropyLoss(), adam(model)


FAULTS = [
    (softmax_twice, "loss.softmax-before-cross-entropy"),
    (softmax_by_hand, "loss.softmax-before-cross-entropy"),
    (sigmoid_twice, "loss.sigmoid-before-bce-logits"),
    (single_sigmoid_twice, "loss.sigmoid-before-bce-logits"),
    (logits_into_nll, "loss.logits-into-probability-loss"),
    (logits_into_bce, "loss.logits-into-probability-loss"),
    (negated, "loss.sign-flipped"),
    (broadcast, "loss.broadcast"),
    (broadcast_by_hand, "loss.broadcast"),
    (sigmoid_for_regression, "loss.bounded-output"),
    (label_too_large, "data.label-out-of-range"),
    (token_too_large, "data.token-mismatch"),
    (nan_in_a_later_batch, "data.nonfinite-input"),
    (bytes_as_floats, "data.unscaled-input"),
    (rate_too_high, "lr.too-high"),
    (rate_diverges, "lr.too-high"),
    (rate_too_low, "lr.too-low"),
    (rate_zero, "optim.no-update"),
    (head_only_in_optimizer, "optim.parameters-missing"),
    (optimizer_of_another_model, "optim.parameters-missing"),
    (cut_graph, "optim.detached-graph"),
    (unregistered, "model.unregistered-parameters"),
    (all_frozen_but_a_bias, "optim.frozen-parameters"),
    (constant_weights, "init.symmetric"),
    (weights_too_large, "init.too-large"),
    (weights_too_small, "init.too-small"),
    (log_of_zero, "loss.undefined-op"),
    (root_of_zero, "loss.undefined-op"),
    (keeps_graphs, "memory.graph-retained"),
    (carries_state, "memory.graph-retained"),
    (sees_the_future, "mask.leaks-future"),
    (masked_everywhere, "mask.fully-masked-row"),
    (tiny_batch_norm, "model.batchnorm-tiny-batch"),
    (half_weights, "precision.low-precision-weights"),
    (sorted_labels, "data.unshuffled"),
    (same_batch_again, "data.repeated-batches"),
    (unrelated_labels, "data.labels-uninformative"),
    (summed_loss, "loss.sum-reduction"),
    (all_ignored, "loss.no-valid-targets"),
]
