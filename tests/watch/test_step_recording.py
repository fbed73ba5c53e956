"""What a sampled step records is the same whenever its numbers are read, and takes little memory."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surefoot.watch.call_facts import CallFacts
from surefoot.watch.context import WatchContext, WatchOptions
from surefoot.watch.model_calls import ModelCalls
from surefoot.watch.parameter_registry import ParameterRegistry, weight_facts
from surefoot.watch.step_recording import StepRecording

MANY_CALLS = """
import math
import surefoot.watch.deferred as deferred
deferred.READ_AT_ONCE.KEEP_OR_CLEAR
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.query, self.norm = nn.Embedding(40, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.hidden, self.head = nn.Linear(16, 12), nn.Linear(12, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids):
        x = self.norm(self.table(ids))
        x = x + F.scaled_dot_product_attention(self.query(x), x, x)
        x = torch.softmax(x @ x.transpose(1, 2) / 4, -1) @ x
        return self.head(F.relu(self.hidden(x)))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
bag = nn.Embedding(9, 1, sparse=True)
other = torch.optim.SGD([*critic.parameters(), *bag.parameters()], lr=0.1)
data = torch.randint(0, 60, (64, 9))
for step in range(14):
    order = torch.randperm(64)
    rows = data[order[:16]]
    ids = rows.clamp(max=39)
    target = ids[:, 1:] % 5
    target = torch.where(target == 4, -100, target)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 5), target.reshape(-1))
    scale = torch.log(torch.rand(16, 5) - (0.3 if step == 2 else -0.1)).nan_to_num(0.0)
    big = (logits.detach().half() * 60000).float().nan_to_num(0.0, 1.0, -1.0)
    log_chances = F.log_softmax(logits, -1)
    gain = (log_chances.exp() * 0.01 * (big.sum() * 0 + 1)).mean() + (log_chances - log_chances.detach()).exp().mean()
    total = loss + 0.1 * gain + 0.01 * (logits[:, 0] - scale).square().mean()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    judged = critic(logits.detach().mean(1)) + 0.01 * bag(rows[:, 0] % 9).sigmoid() * 0.1
    real = (target[:, :1] == 0).float()
    cost = F.binary_cross_entropy(judged.clamp(0, 1), real) + F.mse_loss(judged, torch.ones(16, 1))
    other.zero_grad(set_to_none=False)
    cost.backward()
    other.step()
with torch.no_grad():
    model.eval()(data[:8, :-1].clamp(max=39))
"""


def different(one, other, path=""):
    """Where two trees of facts differ by more than the rounding of a sum.

    Numbers of permutations only tell them apart; candidates that are none take some too.
    """
    if path.endswith("host_seconds") or (path.endswith("number") and ("orders" in path or "permutations" in path)):
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return [each for key in keys for each in different(one.get(key), other.get(key), f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for place, (a, b) in pairs for each in different(a, b, f"{path}[{place}]")]
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        both_nan = one != one and other != other
        return [] if both_nan or math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7) else [(path, one, other)]
    return [] if one == other else [(path, one, other)]


def test_numbers_that_are_read_later_are_those_that_are_read_at_once(watch):
    at_once = watch(MANY_CALLS.replace("KEEP_OR_CLEAR", "copy()"))
    later = watch(MANY_CALLS.replace("KEEP_OR_CLEAR", "clear()"))
    assert at_once.facts["problems"] == later.facts["problems"] == {}
    assert len(at_once.facts["sampled_steps"]) > 5
    calls = [call for look in at_once.facts["sampled_steps"] for call in look["notes"]]
    for kind in ("losses", "errors", "layers", "softmaxes", "folded_ids", "overflows", "orders", "risky"):
        assert kind in calls, kind
    assert different(at_once.facts, later.facts) == []


def test_a_sampled_step_tells_what_it_cost(watch):
    looks = watch(MANY_CALLS.replace("KEEP_OR_CLEAR", "copy()")).facts["sampled_steps"]
    assert all(look["host_seconds"] > 0 for look in looks)


class LargestResult(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def entry_of(name, **more):
    values = {"name": name, "index": 0, "site": "", "module": "", "out_grad": True, "out_dtype": "bfloat16"}
    notes = SimpleNamespace(constant=None, ids=None, domain=None, scalar=None)
    return SimpleNamespace(**values, inputs=[], notes=notes, **more)


@pytest.mark.parametrize("layout", ["rows", "channels"])
@pytest.mark.parametrize("call", ["cross_entropy", "mse_loss", "linear", "relu", "softmax", "sub", "clamp", "model"])
def test_no_temporary_has_the_size_of_an_activation(call, layout):
    rows, classes = 256, 50_000
    numbers = torch.randn(classes, 1, dtype=torch.bfloat16)
    big = numbers.t().repeat(rows, 1)
    if layout == "channels":  # not contiguous
        big = numbers.repeat(1, rows).t()
    target = torch.randint(classes, (rows,))
    calls = CallFacts(0, lambda tensor: 0, None)
    weight = torch.randn(8, 8)
    model = nn.Linear(8, 8)
    with LargestResult() as largest:
        if call == "cross_entropy":
            calls.take(entry_of(call), (big, target), {}, torch.tensor(1.0))
        elif call == "mse_loss":
            calls.take(entry_of(call), (big, big), {}, torch.tensor(1.0))
        elif call == "linear":
            calls.take(entry_of(call), (big, weight), {}, big)
        elif call == "softmax":
            calls.take(entry_of(call), (big, -1), {}, big)
        elif call == "sub":
            calls.take(entry_of(call), (big.detach().requires_grad_(), big), {}, big)
        elif call == "model":
            ModelCalls(0, ParameterRegistry(), None).take(model, (big,), {}, big, 0)
        else:
            calls.take(entry_of(call), (big,), {}, big)
    assert 0 < largest.bytes <= big.nbytes // 2


def test_long_attention_is_judged_by_a_part_of_its_queries():
    query = torch.randn(4, 8, 1024, 16)
    calls = CallFacts(0, lambda tensor: None, None)
    with LargestResult() as largest:
        calls.take(entry_of("scaled_dot_product_attention"), (query, query, query), {}, query)
    assert largest.bytes <= 1 << 23
    assert calls.layers.softmaxes[0].entropy > 0


def test_the_scale_of_a_weight_is_measured_without_a_copy_of_it():
    weight = torch.randn(4096, 1024)
    with LargestResult() as largest:
        (facts,) = weight_facts([weight])
    assert largest.bytes <= weight.nbytes // 16
    assert facts.norm == pytest.approx(float(torch.linalg.vector_norm(weight)))
    assert facts.largest == float(weight.abs().max())
    assert facts.std == pytest.approx(float(weight.std(correction=0)))
    assert facts.rows_equal is False
    assert weight_facts([weight[:1].repeat(5, 1)])[0].rows_equal is True


def test_what_is_kept_of_a_batch_for_later_is_a_few_numbers():
    recording = StepRecording(WatchContext(WatchOptions()), use_recorder=True, thorough=True)
    batch, target = torch.randn(512, 3, 64, 64), torch.randn(512, 1000)
    recording.model_calls.take(nn.Linear(2, 2), (batch,), {}, torch.randn(512, 2, requires_grad=True), 0)
    recording.calls.take(entry_of("mse_loss"), (target, target), {}, torch.tensor(1.0))
    features, kept = recording.model_calls.held[0].features, recording.calls.losses.targets[0]
    assert features.rows.untyped_storage().nbytes() <= 64 * 64 * 4
    assert kept.few.untyped_storage().nbytes() <= 64 * 4
    assert kept.labels is None


PRIOR = """
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(5):
    optimizer.zero_grad()
    kl_divergence(Normal(model(torch.randn(8, 4)), 1.0), Normal(0.0, 1.0)).sum().backward()
    optimizer.step()
"""


def test_a_prior_of_single_numbers_can_be_watched(watch):
    assert watch(PRIOR).facts["problems"] == {}
