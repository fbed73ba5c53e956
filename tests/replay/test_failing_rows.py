"""The rows of a batch that fail are found by halving it, and told from rows that fail together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.record.facts import FailingRows, RepeatedDraws
from surefoot.record.incidents.reading import StoredIncident
from surefoot.record.incidents.values import decode, encode
from surefoot.replay.failing_rows import OTHER_DRAWS, OtherRows, RowSearch, microbatch_to_search


def incident(batch: Any, losses: tuple[float, ...] = (float("nan"),)) -> StoredIncident:
    plain = encode(batch, str, [])
    microbatches = [{"drawn": [plain], "given": None, "calls": [], "streams": None} for _ in losses]
    prints = {"losses": [[{"value": loss}] for loss in losses], "gradients": {}}
    return StoredIncident(Path(), {"fingerprints": prints}, {"window": {"microbatches": microbatches}})


def searched(fails: Any, rows: int = 32, turns: int = 200) -> FailingRows:
    """Play the loop: each turn a part of the batch, which is judged by `fails`."""
    batch = (torch.arange(rows), {"y": torch.arange(rows) * 10})
    held = incident(batch)
    search = RowSearch(held, bar=None)
    (plain,) = held.state["window"]["microbatches"][0]["drawn"]
    for _ in range(turns):
        if not search.take_turn():
            break
        x, rest = decode(search.chosen(plain))
        assert len(x) == rows
        assert torch.equal(rest["y"], x * 10)
        search.note_backward(1.0, finite_gradients=not fails(set(x.tolist())))
        search.note_backward(1.0, finite_gradients=True)
    assert search.is_over == search.found.done
    return search.found


@pytest.mark.parametrize("bad", [{17}, {0}, {31}, {3, 17, 18}])
def test_single_rows_are_found(bad: set[int]) -> None:
    found = searched(lambda rows: bool(rows & bad))
    assert set(found.single) == bad
    assert (found.fails, found.done, found.together) == (True, True, [])
    assert found.tries < 32


def test_rows_that_fail_only_together_are_not_taken_apart() -> None:
    found = searched(lambda rows: {2, 30} <= rows)
    assert (found.single, found.together) == ([], [[0, 31]])
    assert searched(lambda rows: {16, 31} <= rows).together == [[16, 31]]


def test_when_every_part_fails_no_row_is_blamed() -> None:
    found = searched(lambda rows: True)
    assert (found.everywhere, found.single, found.tries) == (True, [], 15)


def test_a_batch_that_does_not_fail_alone_ends_the_hunt() -> None:
    found = searched(lambda rows: False)
    assert (found.fails, found.tries, found.done) == (False, 1, True)


def played(fails: Any, halves: bool = True) -> FailingRows:
    """Play a loop whose step draws random numbers; `fails` is asked with the number of the draw."""
    search = RowSearch(incident(torch.arange(16)), None, halves)
    while search.take_turn():
        search.begins()
        torch.rand(1)
        search.note_backward(1.0, finite_gradients=not fails(search.draw))
    assert search.found.done
    return search.found


def test_a_step_that_fails_with_some_draws_only_is_not_taken_apart() -> None:
    found = played(lambda draw: draw % 3 == 0)
    assert found.draws == RepeatedDraws(random=True, tries=OTHER_DRAWS, failed=3)
    assert (found.tries, found.everywhere, found.together) == (1, False, [])


def test_a_step_that_fails_with_every_draw_is_taken_apart_with_the_captured_one() -> None:
    found = played(lambda draw: True)
    assert found.draws.failed == OTHER_DRAWS
    assert (found.everywhere, found.tries) == (True, 15)


def test_other_draws_are_tried_on_the_whole_batch_alone_if_nothing_else_is_asked() -> None:
    found = played(lambda draw: draw == 2, halves=False)
    assert (found.tries, found.draws) == (0, RepeatedDraws(random=True, tries=OTHER_DRAWS, failed=1))


def test_a_step_without_random_numbers_is_not_repeated() -> None:
    search = RowSearch(incident(torch.arange(16)), None, halves=False)
    assert search.take_turn()
    search.begins()
    search.note_backward(float("nan"), finite_gradients=True)
    assert not search.take_turn()
    assert search.found.draws == RepeatedDraws(random=False, tries=1, failed=1)


def test_a_loop_that_ends_early_leaves_what_was_narrowed_down() -> None:
    found = searched(lambda rows: 17 in rows, turns=5)
    assert not found.done
    assert found.narrowed == [16, 23]


def test_a_loop_that_draws_ahead_is_noticed() -> None:
    search = RowSearch(incident(torch.zeros(8, 1)), None)
    assert search.take_turn()
    assert not search.take_turn()  # and no backward in between, though a step takes one batch
    assert search.is_over
    assert search.found.ahead


def test_rows_need_a_first_dimension_in_common() -> None:
    assert "share no first dimension" in RowSearch(incident((torch.zeros(4), torch.zeros(5))), None).why_not
    assert "single row" in RowSearch(incident(torch.zeros(1, 3)), None).why_not


def test_the_microbatch_with_the_bad_loss_is_the_one_that_is_looked_into() -> None:
    assert microbatch_to_search(incident(torch.zeros(2), (1.0, float("inf"), 2.0))) == 1
    assert microbatch_to_search(incident(torch.zeros(2), (1.0, 2.0))) == 0


def test_other_batches_hold_no_row_of_the_captured_one() -> None:
    others = OtherRows(incident((torch.tensor([[1.0], [2.0]]), torch.tensor([1, 2]))))
    x, y = others.of([torch.tensor([[5.0], [2.0], [7.0]]), torch.tensor([5, 2, 7])])
    assert 2 not in y.tolist()
    assert x.flatten().tolist() == y.tolist()
    assert others.take_kept() == 0
    same = torch.tensor([[2.0], [1.0]])
    assert others.of(same) is same
    assert others.take_kept() == 2


def test_the_captured_batch_dealt_again_gives_way_to_the_one_before() -> None:
    others = OtherRows(incident(torch.tensor([[1.0], [2.0]])))
    before = torch.tensor([[3.0], [4.0]])
    assert others.of(before) is before
    before.zero_()  # the loop may work in place
    assert others.of(torch.tensor([[1.0], [2.0]])).flatten().tolist() == [3.0, 4.0]
    assert others.take_kept() == 0
