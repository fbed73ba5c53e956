"""`dist.gradients-not-averaged`: ranks step with different gradients, and the reason as far as it was recorded.

- Nothing averages them: there is no wrapper, the model inside it was called, or `no_sync()` was on.
- DDP averaged them, and then one rank changed its own, as by clipping on rank 0 only.
- The script averages by hand and forgets some. If the gradients of one parameter of a layer are averaged and those of
  another one are not, one was forgotten. A whole layer that each rank trains for itself may be on purpose.
- A script that averages parameters at intervals (local SGD) has different gradients, and exchanges as many numbers as
  the model has. It is not reported, and neither are communication hooks that need not make gradients equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.core.wording import capital, count_of
from surefoot.diagnose.rank_comparison import first_where
from surefoot.diagnose.rank_words import differing_tensors, first_of, name_ranks, odd_ranks, with_gradients
from surefoot.diagnose.rule import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.diagnose.rank_comparison import ComparedLook, ComparedOptimizer, RankComparison

FEWEST_RECORDS = 3
"""Gradients that were averaged in part are reported if they differ in this many records."""


def gradients_not_averaged(ranks: RankComparison, optimizer: ComparedOptimizer) -> Claim | None:
    """Ranks step with different gradients, and their parameters diverge."""
    looks = optimizer.shared
    if optimizer.facts.has_own_hook:
        return None
    first = first_where(with_gradients(optimizer), "gradients")
    if first is None:
        return _between_records(ranks, optimizer)
    if not optimizer.wrapped and not _means_together(ranks, optimizer, first):
        return None
    later = [look for look in looks if look.step > first.step]
    apart = [look for look in later if look.parameters.differ]
    if not (apart or first.after.differ) or (later and not later[-1].parameters.differ):
        return None  # the parameters are made equal again in any case
    forgotten = [] if optimizer.wrapped else _forgotten(ranks, optimizer)
    if looks[-1].communicated >= optimizer.facts.elements and not forgotten:
        return None  # the script exchanges as much as the model has: local SGD, or its own averaging
    names = forgotten or differing_tensors(ranks, optimizer, first, "gradients")
    differing = sum(look.gradients.differ for look in looks)
    why, fix = _partly_averaged(forgotten) if forgotten else _why_not_averaged(optimizer, first)
    odd = _odd_gradients(first)
    summary = (
        f"{capital(name_ranks(odd['ranks']))} stepped at step {first.step:,} with other gradients than rank "
        f"{odd['compared_with_rank']} in {first_of(names, optimizer)}: {why}."
    )
    return Claim(
        0.97,
        summary,
        first.step,
        (name_ranks(odd["ranks"]), *names[:1], optimizer.facts.site),
        odd
        | {
            "first_step": first.step,
            "first_tensor": names[0] if names else None,
            "tensors_that_differ": len(names),
            "tensors": len(optimizer.facts.names),
            "looks_with_different_gradients": differing,
            "looks": len(looks),
            "wrapped_in_ddp": optimizer.wrapped,
            "forward_of_ddp_ran": None if not optimizer.wrapped else not first.not_called,
            "numbers_exchanged_by_the_script": looks[-1].communicated,
            "ranks_that_changed_gradients_after_backward": first.changed.ranks_with(True),
        },
        "error" if optimizer.wrapped or forgotten else "warning",
        fixes=(fix,),
    )


def _means_together(ranks: RankComparison, optimizer: ComparedOptimizer, look: ComparedLook) -> bool:
    """Whether ranks without a common wrapper were meant to train one model, judged by what they have in common.

    They begin with the same parameters and settings, are connected, and share the data. The members of a sweep begin
    equal too, but use the same data or have other settings, and need no connection.
    """
    alike = look.parameters.agree and not look.lr.differ and not optimizer.type.differ and not optimizer.settings.differ
    return alike and ranks.setups["initialized"].usual is True and look.inputs.differ


def _between_records(ranks: RankComparison, optimizer: ComparedOptimizer) -> Claim | None:
    """Gradients that were not averaged in steps between two records: only the parameters show it."""
    looks = optimizer.shared
    first = first_where(looks, "parameters")
    before = next(
        (look for look in reversed(looks) if first and look.step < first.step and look.parameters.agree), None
    )
    if first is None or before is None:
        return None
    steps = first.unsynchronized_steps - before.unsynchronized_steps
    if steps <= 0:
        return None
    names = differing_tensors(ranks, optimizer, first, "parameters")
    votes = first.parameters
    return Claim(
        0.95,
        f"{capital(name_ranks(votes.odd))} and rank {votes.reference} hold different parameters of "
        f"{first_of(names, optimizer)} at step {first.step:,}; they were equal at step {before.step:,}, and "
        f"{count_of(steps, 'step')} in between followed a forward under `no_sync()`, whose backward averaged nothing.",
        first.step,
        (name_ranks(votes.odd), *names[:1], optimizer.facts.site),
        odd_ranks(votes)
        | {
            "first_step": first.step,
            "last_equal_step": before.step,
            "first_tensor": names[0] if names else None,
            "steps_without_averaged_gradients": steps,
        },
        fixes=(
            "Leave `no_sync()` for the last microbatch before every `optimizer.step()`, also in a last window with "
            "fewer microbatches.",
        ),
    )


def _odd_gradients(look: ComparedLook) -> dict[str, Any]:
    """As `odd_ranks`; if at most half of the ranks changed their gradients after the backward, it is these."""
    changed = look.changed.ranks_with(True)
    others = look.changed.ranks_with(False)
    if not changed or not others or len(changed) > len(others):
        return odd_ranks(look.gradients)
    return {"rank": changed[0], "ranks": changed, "compared_with_rank": others[0]}


def _forgotten(ranks: RankComparison, optimizer: ComparedOptimizer) -> list[str]:
    """Parameters whose gradients always differ, in layers of which another parameter's gradients are always equal."""
    looks = [look for look in with_gradients(optimizer) if look.gradients.differ]
    if len(looks) < FEWEST_RECORDS or not looks[-1].communicated:
        return []
    differing, equal = set(optimizer.facts.names), set(optimizer.facts.names)
    for look in (looks[0], looks[len(looks) // 2], looks[-1]):
        odd, other = look.gradients.odd[0], look.gradients.reference
        differing &= set(ranks.first_tensors(optimizer.number, look.step, "gradients", odd, other))
        equal &= set(ranks.equal_tensors(optimizer.number, look.step, "gradients", odd, other))
    layers = {name.rpartition(".")[0] for name in equal}
    return [name for name in optimizer.facts.names if name in differing and name.rpartition(".")[0] in layers]


def _partly_averaged(names: Sequence[str]) -> tuple[str, str]:
    return (
        "the script averages the gradients of other parameters of the same layer, and not these",
        f"Average every gradient, also that of `{names[0]}`: loop over `model.parameters()`, or wrap the model in "
        "DistributedDataParallel.",
    )


def _why_not_averaged(optimizer: ComparedOptimizer, look: ComparedLook) -> tuple[str, str]:
    """The reason, as far as the wrapper shows it, and what to change."""
    if not optimizer.wrapped:
        return (
            "nothing averages them, since the model is not wrapped in DistributedDataParallel",
            "Wrap the model before the loop: `model = DistributedDataParallel(model)`.",
        )
    if look.not_called:
        return (
            "the forward of DistributedDataParallel has never run, so the model inside was called directly",
            "Call the wrapped model: `model(x)`, not `model.module(x)`.",
        )
    if look.not_synchronized:
        return (
            "the last forward before the step ran under `no_sync()`, so its backward averaged nothing",
            "Leave `no_sync()` for the last microbatch before `optimizer.step()`.",
        )
    if look.changed.differ:
        changed = name_ranks(look.changed.ranks_with(True))
        return (
            f"DistributedDataParallel averaged them, and then they were changed on {changed} only, between the "
            "backward and the step",
            "Clip, scale or mask gradients on every rank in the same way: remove the condition on the rank around it.",
        )
    if look.changed.ranks_with(True):
        return (
            "DistributedDataParallel averaged them, and then every rank changed them, each in its own way, between the "
            "backward and the step",
            "Divide the loss instead of the gradients, by a number that all ranks share: all-reduce the count of rows "
            "or tokens first.",
        )
    return (
        "DistributedDataParallel ran, but did not average the gradients that the optimizer used",
        "Call `backward` on what the wrapped model returned, and keep its parameters: DDP averages only the "
        "gradients of the parameters that it was given.",
    )
