"""The signals that trainers log about a policy, by the names that they use, and their meaning.

The names are those of TRL, which adds prefixes and suffixes: `objective/kl`, `clip_ratio/high_mean`, `kl`. A script
that passes its own signals to `observe` uses the same short names. In the run log a slash is an underscore.
"""

from __future__ import annotations

_KINDS = {
    "frac_reward_zero_std": "equal_groups",
    "importance_sampling_ratio": "ratio",
    "reward_std": "reward_std",
    "clip_ratio": "clip_fraction",
    "clipfrac": "clip_fraction",
    "approxkl": "kl",
    "entropy": "entropy",
    "reward": "reward",
    "kl": "kl",
}
"""The words that name a signal, longer ones first, and their meaning.

`kl`: divergence from the old or reference policy per token or action. `entropy`: in nats per token or action.
`equal_groups`: the share of groups in which every sample has the same reward. `ratio`: importance ratios.
"""
_WITH_ENDING = ("clip_ratio", "importance_sampling_ratio")
"""Words that are followed by the reduction over the batch: `clip_ratio/high_mean`."""
_EXACT = {"ratio": "ratio", "val/ratio": "ratio", "objective/kl": "sequence_kl"}
"""`objective/kl` is a sum over each sequence, which depends on its length: it is recorded but not judged."""


def kind_of(name: str) -> str | None:
    """The meaning of a signal with this name for a policy; `None` if it is not about one."""
    name = logged_name(name).removesuffix("_avg").removesuffix("_mean")
    for exact, kind in _EXACT.items():
        if name == logged_name(exact):
            return kind
    for word, kind in _KINDS.items():
        if name == word or name.endswith(f"_{word}") or (word in _WITH_ENDING and f"{word}_" in name):
            return kind
    return None


def logged_name(name: str) -> str:
    """The name of a signal in the run log."""
    return name.replace("/", "_")
