"""Observes policies and posteriors: the entropy of action distributions, and the divergence from a reference.

Only `Categorical` policies are covered. A divergence counts if the other distribution is neither learned nor the same
for every row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from surefoot.core.without_hooks import WithoutHooks
from surefoot.observe.readable import is_readable
from surefoot.record.facts import PolicyDivergence, PolicyEntropy
from surefoot.watch.user_frames import site

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


MOST_ENTROPIES, MOST_DIVERGENCES = 2_000, 1_000
ALL_OF_FIRST = 200
"""The first values are all recorded, up to this number; later ones at every 16th step."""


def wrap_policies(watcher: Watcher, wrapping: Hooks) -> None:
    """Observe log-probabilities of actions, and divergences."""

    def log_prob(result: Any, args: Any, kwargs: Any) -> None:
        if isinstance(result, Tensor):  # may be a proxy of torch.fx
            _record_log_prob(watcher, args[0], result)

    def divergence(result: Any, args: Any, kwargs: Any) -> None:
        if isinstance(result, Tensor) and is_readable(result) and result.requires_grad:
            _record_divergence(watcher, args[1], result, site(5))

    why = "the entropy of a policy, and where log-probabilities are computed"
    wrapping.after(Categorical, "log_prob", "policies", log_prob, why)
    why = "the divergence of a learned distribution from a fixed one"
    wrapping.after(torch.distributions.kl, "kl_divergence", "policies", divergence, why)


def _record_log_prob(watcher: Watcher, distribution: Any, result: Tensor) -> None:
    state, policy = watcher.state, watcher.calls.policy
    if state.sampled is not None and state.sampled.recorder is not None:
        index = state.sampled.recorder.maker(result)
        if index is not None:
            state.sampled.recorder.entries[index].name = "log_prob"
    is_due = len(policy) < ALL_OF_FIRST or state.steps % 16 == 0
    if not result.requires_grad or not is_readable(result) or not is_due or len(policy) >= MOST_ENTROPIES:
        return
    if state.backwards != (policy[-1].backward if policy else -1):
        entropy, actions = _entropy_of(distribution), distribution.param_shape[-1]
        policy.append(PolicyEntropy(step=state.steps, backward=state.backwards, entropy=entropy, actions=actions))


def _entropy_of(distribution: Any) -> float:
    with WithoutHooks():
        held = vars(distribution)  # its attribute `probs` would cache the values
        chances = held["probs"] if "probs" in held else held["logits"].softmax(-1)
        return float(torch.special.entr(chances.detach().float()).sum(-1).mean())


def _record_divergence(watcher: Watcher, other: Any, result: Tensor, where: str) -> None:
    """Record the KL divergence from a distribution that is not learned and differs between rows."""
    state, known = watcher.state, watcher.calls.divergences
    if (known and known[-1].backward == state.backwards) or len(known) >= MOST_DIVERGENCES:
        return
    if len(known) >= ALL_OF_FIRST and state.backwards % 16:
        return
    with WithoutHooks():
        held = [t for name in other.arg_constraints if isinstance(t := other.__dict__.get(name), Tensor)]
        if not held or any(tensor.requires_grad for tensor in held):
            return
        if any(float(tensor.double().std(0).max()) > 0 for tensor in held if tensor.dim() and len(tensor) > 1):
            kl = float(result.detach().mean())
            known.append(PolicyDivergence(step=state.steps, backward=state.backwards, site=where, kl=kl))
