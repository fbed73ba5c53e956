"""Causes that only a comparison of the ranks shows. Each rule takes the comparison of one optimizer over the ranks.

Facts that separate a fault from healthy differences:

- Different losses, batches, dropout masks and augmentations per rank are healthy. The gradients that the optimizer uses
  must be equal after averaging, and so must the parameters. Both are equal to the last bit.
- Ranks that train separate models on purpose are not reported: the members of an ensemble have other parameters from
  the first step on, and those of a sweep other settings, or the same data.
- Gradients that differ have a module of their own: `rank_gradients`.
- Inside of DDP's `join()`, ranks take different numbers of steps, which are not compared.
- Shards of FSDP and DTensor are not compared at all (`watch.replica_looks`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surefoot.core.wording import capital
from surefoot.diagnose.rank_comparison import ComparedLook, first_where
from surefoot.diagnose.rank_gradients import gradients_not_averaged
from surefoot.diagnose.rank_words import differing_tensors, first_of, name_ranks, odd_ranks, with_gradients
from surefoot.diagnose.rule import Claim

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.diagnose.rank_comparison import ComparedOptimizer, FingerprintKind, RankComparison, Votes

FEWEST_BATCHES = 3
"""Equal batches on all ranks may be a coincidence, or a script that trains on one batch, but not with this many."""


@dataclass(frozen=True)
class RankRule:
    """How one cause is recognised from several ranks."""

    code: str
    """The cause, as a code of the catalogue."""
    find: Callable[[RankComparison, ComparedOptimizer], Claim | None]
    """Returns a claim; `None` if evidence is missing or contradicts the cause."""
    explains: tuple[str, ...] = ()
    """Causes that are consequences of this one."""


def rank_claims(ranks: RankComparison) -> list[tuple[RankRule, Claim]]:
    """The claims of the rules: for each cause, about the first optimizer that has it."""
    found: list[tuple[RankRule, Claim]] = []
    for rule in RANK_RULES:
        claims = (rule.find(ranks, optimizer) for optimizer in ranks.optimizers if optimizer.shared)
        claim = next((claim for claim in claims if claim is not None), None)
        if claim is not None and rule.code not in {known.code for known, _ in found}:
            found.append((rule, claim))
    return found


# ---- what the ranks have in common ----------------------------------------------------------------------------------


def _averages(optimizer: ComparedOptimizer) -> bool:
    """Whether the ranks step with the same gradients, by DDP or by the script itself."""
    looks = with_gradients(optimizer)
    return bool(looks) and 2 * sum(look.gradients.agree for look in looks) >= len(looks)


def _together(optimizer: ComparedOptimizer) -> bool:
    """Whether the ranks train one model: DDP averages their gradients, or the script does."""
    return optimizer.wrapped or _averages(optimizer)


# ---- replicas -------------------------------------------------------------------------------------------------------


def replicas_diverged(ranks: RankComparison, optimizer: ComparedOptimizer) -> Claim | None:
    """Ranks step with the same gradients, but hold different parameters."""
    looks = optimizer.shared
    first = first_where(looks, "parameters")
    if first is None or optimizer.facts.has_own_hook or not _averages(optimizer):
        return None
    moments = first_where([look for look in looks if look.step < first.step], "moments")
    before = next((look for look in reversed(looks) if look.step < first.step and look.parameters.agree), None)
    if moments is not None and not moments.lr.differ:
        return _diverged(ranks, optimizer, moments, "moments", before, *_in_moments(moments))
    moved = before.moved if before is not None else []
    if before is not None and moved and len(moved) < before.parameters.count:
        return _moved(ranks, optimizer, first, before)
    return _diverged(ranks, optimizer, first, "parameters", before, *_since(first, before))


def _diverged(
    ranks: RankComparison,
    optimizer: ComparedOptimizer,
    look: ComparedLook,
    kind: FingerprintKind,
    before: ComparedLook | None,
    why: str,
    fix: str,
) -> Claim:
    votes: Votes = getattr(look, kind)
    names = differing_tensors(ranks, optimizer, look, kind)
    return Claim(
        0.95,
        f"{capital(name_ranks(votes.odd))} and rank {votes.reference} hold different {kind} of "
        f"{first_of(names, optimizer)} {why}.",
        look.step,
        (name_ranks(votes.odd), *names[:1]),
        odd_ranks(votes)
        | {
            "first_step": look.step,
            "last_equal_step": before.step if before is not None and before.step < look.step else None,
            "first_tensor": names[0] if names else None,
            "tensors_that_differ": len(names),
            "tensors": len(optimizer.facts.names),
            "gradients_are_equal": look.gradients.agree,
            "backwards": look.backwards.by_rank() if look.backwards.differ else None,
            "changed_without_a_step": False,
        },
        fixes=(fix,),
    )


def _in_moments(look: ComparedLook) -> tuple[str, str]:
    return (
        f"at step {look.step:,}, although the parameters are still equal: the optimizer's state was changed or loaded "
        "on some ranks only",
        "Load or change the optimizer's state on every rank: remove the condition on the rank around "
        "`optimizer.load_state_dict`.",
    )


def _since(look: ComparedLook, before: ComparedLook | None) -> tuple[str, str]:
    """Since when ranks hold different parameters and why, as far as is known, and what to change."""
    if before is None:
        return (
            f"from the first compared step ({look.step:,}): they were never made equal",
            "Load or change the parameters before `DistributedDataParallel(model)` is made, which broadcasts those of "
            "rank 0, or do it on every rank.",
        )
    if look.backwards.differ and not before.backwards.differ:
        counts = look.backwards.by_rank()
        said = ", ".join(f"{rank} after {count:,} backwards" for rank, count in counts.items())
        return (
            f"at step {look.step:,}: they do not take the same steps ({said})",
            "Let every rank take the same steps: all-reduce the decision to skip one.",
        )
    if before.after.differ and before.gradients.agree and before.moments.agree and not before.lr.differ:
        return (
            f"after step {before.step:,}, which gave different results for equal parameters, gradients and moments: "
            "look for a difference between the machines, or a change inside the step",
            "Look for code that changes the parameters inside the optimizer's step or in a hook of it; without any, "
            "compare the machines.",
        )
    return (
        f"at step {look.step:,}; they were equal at step {before.step:,}, and their gradients are equal: something "
        "other than the averaged gradients changed them",
        f"Look for code that changes parameters between steps {before.step:,} and {look.step:,} (new random values, "
        "averages, a loaded state), and broadcast the result from rank 0.",
    )


def _moved(ranks: RankComparison, optimizer: ComparedOptimizer, look: ComparedLook, before: ComparedLook) -> Claim:
    """The parameters of some ranks changed between two steps, where no optimizer changes them."""
    odd = before.moved
    reference = next((rank for rank in (look.parameters.reference, *ranks.folders) if rank not in odd), odd[0])
    names = ranks.first_tensors(optimizer.number, look.step, "parameters", odd[0], reference)
    return Claim(
        0.98,
        f"The parameters of {name_ranks(odd)} changed between step {before.step:,} and step {before.step + 1:,} "
        f"without a step of the optimizer; first in {first_of(names, optimizer)}. Those of rank {reference} did not.",
        before.step + 1,
        (name_ranks(odd), *names[:1]),
        {
            "rank": odd[0],
            "ranks": odd,
            "compared_with_rank": reference,
            "first_step": before.step + 1,
            "last_equal_step": before.step,
            "first_tensor": names[0] if names else None,
            "tensors_that_differ": len(names),
            "tensors": len(optimizer.facts.names),
            "changed_without_a_step": True,
        },
        fixes=(
            f"Look for code that writes parameters after `optimizer.step()` on {name_ranks(odd)} only; if there is "
            "none, the memory of its device is suspect.",
        ),
    )


# ---- settings -------------------------------------------------------------------------------------------------------


_SAME_SCALER = "Create the gradient scaler with the same settings on every rank: the first scales already differ."


def scale_disagrees(ranks: RankComparison, optimizer: ComparedOptimizer) -> Claim | None:
    """Ranks scale the loss by different numbers, or one skips a step that the others take."""
    if not _together(optimizer):
        return None
    for look in optimizer.shared:
        if look.scale.differ:
            votes = look.scale
            words = "At step {step:,} rank {odd} scaled the loss by {mine} and rank {reference} by {other}"
        elif look.skips.differ and look.backwards.differ and look.scale.count:
            votes = look.skips
            words = "By step {step:,} rank {odd} had skipped {mine} steps for an overflow and rank {reference} {other}"
        else:
            continue
        mine, other = _both(votes)
        said = words.format(step=look.step, odd=votes.odd[0], reference=votes.reference, mine=mine, other=other)
        first = _first_difference(ranks, optimizer)
        return Claim(
            0.97,
            f"{said}: averaged gradients have no common scale, and a step may be taken on some ranks only.",
            look.step,
            (name_ranks(votes.odd), *first),
            odd_ranks(votes)
            | {
                "first_step": look.step,
                "first_tensor": first[0] if first else None,
                "scales": look.scale.by_rank() if look.scale.count else None,
                "skipped_steps": look.skips.by_rank(),
            },
            fixes=(_SAME_SCALER,) if look is optimizer.shared[0] else (),
        )
    return None


def config_disagrees(ranks: RankComparison, optimizer: ComparedOptimizer) -> Claim | None:
    """Ranks that train one model differ in optimizer, learning rate, code, versions or data."""
    if not _together(optimizer):
        return None
    named = (_optimizers(optimizer) or _learning_rates(optimizer) or _code(ranks) or _datasets(ranks)
             or _versions(ranks))  # fmt: skip
    if named is None:
        return None
    return _disagreement(ranks, optimizer, named)


def samplers_disagree(ranks: RankComparison, optimizer: ComparedOptimizer) -> Claim | None:
    """The loader that feeds the first step has a `DistributedSampler` on some of the ranks that train one model.

    The others draw all rows of the same data set, and have more batches: they wait for ranks that have ended.
    """
    if not _together(optimizer) or ranks.loaders.mapped(_without_samplers).differ:
        return None  # one rank may evaluate before it trains
    votes = ranks.loaders.mapped(_samplers)
    if not votes.differ or not any("DistributedSampler" in names for names in votes.values):
        return None
    found = "the sampler of the loader", votes, optimizer.shared[0].step, True
    claim = _disagreement(ranks, optimizer, found)
    return replace(claim, fixes=("Give the loader of every rank a `DistributedSampler`, not only that of some ranks.",))


def _samplers(loaders: tuple[tuple[str, int | None, int | None], ...]) -> tuple[str, ...]:
    return tuple(sampler for sampler, _, _ in loaders)


def _without_samplers(loaders: tuple[tuple[str, int | None, int | None], ...]) -> tuple[tuple[int | None, ...], ...]:
    return tuple((rows, batch_size) for _, rows, batch_size in loaders)


def _disagreement(ranks: RankComparison, optimizer: ComparedOptimizer, found: _Difference) -> Claim:
    what, votes, step, is_error = found
    mine, other = _both(votes)
    first = _first_difference(ranks, optimizer)
    return Claim(
        0.97,
        f"{capital(name_ranks(votes.odd))} and rank {votes.reference} differ in {what} at step {step:,}: {mine} and "
        f"{other}. They train one model.",
        step,
        (name_ranks(votes.odd), *first, optimizer.facts.site),
        odd_ranks(votes)
        | {"what": what, "first_step": step, "first_tensor": first[0] if first else None}
        | {f"rank {votes.odd[0]}": mine, f"rank {votes.reference}": other},
        "error" if is_error else "warning",
    )


_Difference = tuple[str, "Votes", int, bool]
"""What differs, on which ranks, since when, and whether it is an error."""


def _optimizers(optimizer: ComparedOptimizer) -> _Difference | None:
    step = optimizer.shared[0].step
    if optimizer.type.differ:
        return "the class of the optimizer", optimizer.type, step, True
    return ("the settings of the optimizer", optimizer.settings, step, True) if optimizer.settings.differ else None


def _learning_rates(optimizer: ComparedOptimizer) -> _Difference | None:
    look = first_where((look for look in optimizer.shared if not look.backwards.differ), "lr")
    return None if look is None else ("the learning rate", look.lr, look.step, True)


def _code(ranks: RankComparison) -> _Difference | None:
    found = next((item for item in sorted(ranks.code.items()) if item[1].differ), None)
    return None if found is None else (f"the code of {found[0]} (its hash)", found[1], 0, True)


def _datasets(ranks: RankComparison) -> _Difference | None:
    found = next((votes for votes in ranks.datasets.values() if votes.differ), None)
    return None if found is None else ("the number of rows behind `DistributedSampler`", found, 0, True)


def _versions(ranks: RankComparison) -> _Difference | None:
    for name in ("torch", "python"):
        if ranks.setups[name].differ:
            return f"the version of {name}", ranks.setups[name], 0, False
    return None


def _first_difference(ranks: RankComparison, optimizer: ComparedOptimizer) -> list[str]:
    """The first parameter that differed between ranks; empty if there is none."""
    look = first_where(optimizer.shared, "parameters")
    return [] if look is None else differing_tensors(ranks, optimizer, look, "parameters")[:1]


def _both(votes: Votes) -> tuple[str, str]:
    """The values of the first odd rank, and of the one that it is compared with, as text."""
    values = votes.by_rank()
    mine, other = values[f"rank {votes.odd[0]}"], values[f"rank {votes.reference}"]
    if isinstance(mine, tuple) and isinstance(other, tuple):
        if mine and isinstance(mine[0], tuple):  # the settings of parameter groups
            return _settings(mine, other), _settings(other, mine)
        return ", ".join(map(_number, mine)), ", ".join(map(_number, other))
    return _number(mine), _number(other)


def _settings(mine: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """The settings of parameter groups in which they differ from others."""
    theirs = [*other, *[()] * len(mine)]
    differing = [pair for group, known in zip(mine, theirs, strict=False) for pair in group if pair not in known]
    return ", ".join(f"{name}={value}" for name, value in dict.fromkeys(differing)) or f"{len(mine)} parameter groups"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


# ---- data -----------------------------------------------------------------------------------------------------------


def not_sharded(ranks: RankComparison, optimizer: ComparedOptimizer) -> Claim | None:
    """All ranks are trained on the same batches."""
    looks = optimizer.shared
    if not looks[0].parameters.agree or not _together(optimizer):
        return None  # separate models may use the same data
    for kind, said in (("inputs", "inputs"), ("targets", "targets")):
        votes = [found for look in looks if (found := getattr(look, kind)).count > 1 and not look.backwards.differ]
        if len(votes) < FEWEST_BATCHES or any(each.differ for each in votes):
            continue
        if len({each.usual for each in votes}) < FEWEST_BATCHES:
            continue
        whole = max(each.count for each in votes)
        seeds = ranks.setups["seed"]
        others = sorted(rank for rank in ranks.folders if rank != min(ranks.folders))
        return Claim(
            0.96,
            f"All {whole} ranks were trained on the same batches: at all {len(votes)} steps that were compared, from "
            f"step {looks[0].step:,} on, {name_ranks(others)} had the {said} of rank {min(ranks.folders)}.",
            looks[0].step,
            (name_ranks(others), "inputs" if kind == "inputs" else "targets"),
            {
                "rank": others[0],
                "ranks": others[:64],
                "compared_with_rank": min(ranks.folders),
                "first_step": looks[0].step,
                "first_tensor": said,
                "steps_compared": len(votes),
                "different_batches": len({each.usual for each in votes}),
                "same_seed": seeds.agree,
                "distributed_sampler": bool(ranks.datasets),
            },
            "warning",
            fixes=(
                "Give the loader `sampler=DistributedSampler(dataset)` and call `sampler.set_epoch(epoch)` in each "
                "epoch."
                if not ranks.datasets
                else "Give `DistributedSampler` the rank and the number of ranks, or initialize `torch.distributed` "
                "before it is made.",
            ),
        )
    return None


RANK_RULES: tuple[RankRule, ...] = (
    RankRule("dist.config-disagrees", samplers_disagree, ("dist.hang", "dist.collective-failed")),
    RankRule("dist.config-disagrees", config_disagrees, ("dist.replicas-diverged",)),
    RankRule("dist.scale-disagrees", scale_disagrees, ("dist.replicas-diverged", "dist.gradients-not-averaged")),
    RankRule("dist.gradients-not-averaged", gradients_not_averaged, ("dist.replicas-diverged",)),
    RankRule("dist.replicas-diverged", replicas_diverged),
    RankRule("data.not-sharded", not_sharded),
)
"""The cause before its consequences."""
