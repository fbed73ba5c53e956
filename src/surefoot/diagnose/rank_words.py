"""What the rules about ranks have in common: which records can be compared, and how ranks and tensors are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surefoot.diagnose.rank_comparison import (
        ComparedLook,
        ComparedOptimizer,
        FingerprintKind,
        RankComparison,
        Votes,
    )


def with_gradients(optimizer: ComparedOptimizer) -> list[ComparedLook]:
    """Records at which the ranks step with the gradients of the same backward, and none has only zeros."""
    return [look for look in optimizer.shared if not look.without_gradients and not look.backwards.differ]


def name_ranks(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 3 and 5`, `ranks 1, 2, 3 and 12 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [str(number) for number in numbers]
    if len(shown) > 4:
        return f"ranks {', '.join(shown[:3])} and {len(shown) - 3} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def odd_ranks(votes: Votes) -> dict[str, Any]:
    """Evidence: the ranks that differ from most, and the one that they are compared with."""
    return {"rank": votes.odd[0], "ranks": votes.odd, "compared_with_rank": votes.reference}


def differing_tensors(
    ranks: RankComparison, optimizer: ComparedOptimizer, look: ComparedLook, kind: FingerprintKind
) -> list[str]:
    """The names of the parameters in which the first odd rank differs."""
    votes: Votes = getattr(look, kind)
    return ranks.first_tensors(optimizer.number, look.step, kind, votes.odd[0], votes.reference)


def first_of(names: Sequence[str], optimizer: ComparedOptimizer) -> str:
    """`` `fc.weight` and 3 more of 8 parameters ``."""
    if not names:
        return "the parameters"
    of = f"of {len(optimizer.facts.names)} parameters"
    return f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` and {len(names) - 1} more {of}"
