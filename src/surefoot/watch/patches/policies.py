"""Policies and posteriors: the entropy of the actions chosen from, and the divergence from a reference.

Only `Categorical` policies are read. A divergence counts when the other distribution is neither learned nor the same
for every row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from surefoot.observe.readable import is_readable
from surefoot.watch.script_hooks import WithoutHooks
from surefoot.watch.user_frames import site

if TYPE_CHECKING:
    from surefoot.watch.patches.hooks import Hooks
    from surefoot.watch.watcher import Watcher


def wrap_policies(watcher: Watcher, wrapping: Hooks) -> None:
    """Log-probabilities of actions, and divergences."""

    def entropy_of(distribution: Any) -> float:
        with WithoutHooks():
            held = vars(distribution)  # asked for its `probs`, it would keep them
            chances = held["probs"] if "probs" in held else held["logits"].softmax(-1)
            return float(torch.special.entr(chances.detach().float()).sum(-1).mean())

    def log_prob(result: Any, args: Any, kwargs: Any) -> None:
        if not isinstance(result, Tensor):  # a trace of torch.fx, for instance
            return
        if watcher.look is not None and watcher.look.tape is not None:
            index = watcher.look.tape.maker(result)
            if index is not None:
                watcher.look.tape.entries[index].name = "log_prob"
        if (
            result.requires_grad
            and is_readable(result)
            and (len(watcher.policy) < 200 or watcher.steps % 16 == 0)
            and len(watcher.policy) < 2000
        ):
            last = watcher.policy[-1]["backward"] if watcher.policy else -1
            if watcher.backwards != last:
                entropy = entropy_of(args[0])
                watcher.policy.append(
                    {"step": watcher.steps, "backward": watcher.backwards, "entropy": entropy}
                    | {"actions": args[0].param_shape[-1]}
                )

    why = "the entropy of a policy, and where log-probabilities are made"
    wrapping.after(Categorical, "log_prob", "policies", log_prob, why)

    def divergence(result: Any, args: Any, kwargs: Any) -> None:
        """The KL divergence from a distribution that is not learned and not the same for every row."""
        notes = watcher.divergences
        if not isinstance(result, Tensor) or not is_readable(result):
            return
        if not result.requires_grad or (notes and notes[-1]["backward"] == watcher.backwards) or len(notes) >= 1000:
            return
        if len(notes) >= 200 and watcher.backwards % 16:
            return
        with WithoutHooks():
            other = args[1]
            held = [t for name in other.arg_constraints if isinstance(t := other.__dict__.get(name), Tensor)]
            if not held or any(tensor.requires_grad for tensor in held):
                return
            if any(tensor.dim() and float(tensor.double().std(0).max()) > 0 for tensor in held if len(tensor) > 1):
                found = {"step": watcher.steps, "backward": watcher.backwards, "site": site(4)}
                notes.append(found | {"kl": float(result.detach().mean())})

    why = "the divergence of a learned distribution from a fixed one"
    wrapping.after(torch.distributions.kl, "kl_divergence", "policies", divergence, why)
