"""Ids and labels are copied before the call, and the call that they did not fit is named; see `tests/gpu`, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.core import device
from surefoot.diagnose.engine import diagnose
from surefoot.record.facts import CrashFacts, RunFacts
from surefoot.watch import indexed_calls
from surefoot.watch.context import WatchContext, WatchOptions
from surefoot.watch.crash import describe_end
from surefoot.watch.indexed_calls import IndexedCalls

MESSAGE = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported at some other API call"


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> IndexedCalls:
    monkeypatch.setattr(device, "_failure", [])
    context = WatchContext(WatchOptions())
    context.state.steps = 7
    return IndexedCalls(context)


def crashed(ranges: IndexedCalls) -> CrashFacts:
    facts = describe_end(torch.AcceleratorError(MESSAGE), ranges)
    assert facts is not None
    assert RunFacts.from_json(RunFacts(crash=facts).to_json()).crash == facts
    return facts


def first_finding(crash: CrashFacts) -> tuple[str, int | None, str]:
    found = diagnose(RunFacts(steps=9, crash=crash), strict=True).findings[0]
    return found.cause, found.step, found.summary


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_id_beyond_the_table_is_named_with_its_table_step_and_line(ranges: IndexedCalls, dtype: torch.dtype) -> None:
    table = nn.Embedding(10, 4).weight
    ranges._registry.add(table).name = "wte.weight"
    ranges.take("embedding", torch.tensor([[0, 9]], dtype=dtype), table, 0, None)
    tokens = torch.tensor([[3, 10, 1]], dtype=dtype)
    ranges.take("embedding", tokens, table, 0, None)
    ranges.take("embedding", torch.tensor([-5, 99], dtype=dtype), table, 0, None)  # came after the first that failed
    cause, step, summary = first_finding(crashed(ranges))
    assert (cause, step) == ("data.token-mismatch", 7)
    assert "Ids run from 1 to 10 at " in summary
    assert "test_indexed_calls.py:" in summary
    assert "the embedding has 10 rows (ids 0 to 9)" in summary
    assert "It failed on the device at step 7 (`tokens` in `wte.weight`)." in summary


@pytest.mark.parametrize(("labels", "low", "high"), [([0, 5], 0, 5), ([-1, 2, -100], -1, 2), ([-100, -100, 7], 7, 7)])
def test_a_label_beyond_the_classes_is_named_and_the_ignored_one_does_not_count(
    ranges: IndexedCalls, labels: list[int], low: int, high: int
) -> None:
    scores = torch.randn(len(labels), 5)
    ranges.take("cross_entropy", torch.tensor([0, 4, -100]), scores, 1, -100)
    assert ranges.first_misfit() is None
    ranges.take("cross_entropy", torch.tensor(labels), scores, 1, -100)
    cause, step, summary = first_finding(crashed(ranges))
    assert (cause, step) == ("data.label-out-of-range", 7)
    assert f"abels run from {low} to {high} at " in summary
    assert "5 outputs (labels 0 to 4)" in summary


def test_scores_that_are_no_probabilities_are_named_with_their_range(ranges: IndexedCalls) -> None:
    for _ in range(3):
        ranges.take_probabilities(torch.rand(8, 1))
    assert ranges.first_misfit() is None
    ranges.take_probabilities(torch.tensor([0.5, -1.5, 2.25]))
    cause, step, summary = first_finding(crashed(ranges))
    assert (cause, step) == ("loss.logits-into-probability-loss", 7)
    assert "was given values from -1.5 to 2.25; it takes probabilities" in summary
    assert "It failed on the device at step 7" in summary


def test_probabilities_that_are_nan_are_no_scores(ranges: IndexedCalls) -> None:
    ranges.take_probabilities(torch.tensor([0.5, float("nan")]))
    crash = crashed(ranges)
    assert crash.arguments is not None
    assert crash.arguments.input is not None
    assert (crash.arguments.input.nonfinite, crash.arguments.input.min) == (1, None)
    causes = [found.cause for found in diagnose(RunFacts(steps=9, crash=crash), strict=True).findings]
    assert causes
    assert "loss.logits-into-probability-loss" not in causes


def test_where_everything_fits_the_finding_says_so_and_how_to_learn_more(ranges: IndexedCalls) -> None:
    for _ in range(3):
        ranges.take("nll_loss", torch.tensor([0, 4]), torch.randn(2, 5), 1, -100)
    crash = crashed(ranges)
    assert (crash.calls_checked, crash.step) == (3, None)
    found = diagnose(RunFacts(steps=9, crash=crash), strict=True)
    assert found.verdict == "broken"
    assert found.findings[0].cause == "device.assert"
    assert "last 3 calls" in found.findings[0].summary
    assert any("CUDA_LAUNCH_BLOCKING=1" in fix for fix in found.findings[0].fixes)


def test_memory_is_bounded_and_only_the_last_calls_are_kept(ranges: IndexedCalls) -> None:
    scores = torch.randn(1, 5)
    for number in range(2 * indexed_calls.SLOTS + 5):
        ranges.take("cross_entropy", torch.tensor([9 if number == indexed_calls.SLOTS + 9 else 1]), scores, 1, -100)
    (ring,) = ranges._rings.values()
    assert len(ring.calls) == len({id(slot) for slot, *_ in ring.calls}) == indexed_calls.SLOTS
    misfit = ranges.first_misfit()
    assert misfit is not None
    assert misfit[1:] == (9, 9)


def test_indices_that_have_not_arrived_are_no_evidence(ranges: IndexedCalls) -> None:
    scores = torch.randn(2, 5)
    for number in range(4):
        ranges.take("cross_entropy", torch.tensor([1, 9 if number == 2 else 1]), scores, 1, -100)
    (ring,) = ranges._rings.values()
    ring.calls[2][0].seen[0] = ring._absent  # as if the device had not come to it
    assert ranges.first_misfit() is None
    assert crashed(ranges).calls_checked == 3


def test_memory_that_is_still_to_be_written_to_is_not_used_again(ranges: IndexedCalls) -> None:
    scores = torch.randn(1, 5)
    for _ in range(indexed_calls.SLOTS):
        ranges.take("cross_entropy", torch.tensor([1]), scores, 1, -100)
    (ring,) = ranges._rings.values()
    first = ring.calls[0]
    first[0].seen[0] = ring._absent  # as if the device had not come to it
    ranges.take("cross_entropy", torch.tensor([9]), scores, 1, -100)
    assert ring.calls[0] is first
    assert ranges.first_misfit() is None


@pytest.mark.parametrize("count", [1, 64, 65, indexed_calls.MOST_COPIED, indexed_calls.MOST_COPIED + 1])
def test_few_indices_and_very_many_are_judged_alike(ranges: IndexedCalls, count: int) -> None:
    scores = torch.randn(1, 5).expand(2 * count, 5)
    fine = torch.full((2, count), 4)
    fine[0] = -100
    ranges.take("cross_entropy", fine.T, scores, 1, -100)  # is not contiguous
    assert ranges.first_misfit() is None
    fine[1, -1] = 5
    ranges.take("cross_entropy", fine.T, scores, 1, -100)
    misfit = ranges.first_misfit()
    assert misfit is not None
    assert misfit[2] == 5


def test_of_several_misfits_in_rings_of_their_own_the_first_counts(ranges: IndexedCalls) -> None:
    scores = torch.randn(1, 5)
    ranges.take("cross_entropy", torch.tensor([7] * 100), scores.expand(100, 5), 1, -100)
    ranges.take("cross_entropy", torch.tensor([9]), scores, 1, -100)
    misfit = ranges.first_misfit()
    assert misfit is not None
    assert misfit[1:] == (7, 7)


def test_the_same_indices_are_taken_once_in_a_step_unless_they_were_written_to(ranges: IndexedCalls) -> None:
    scores, labels = torch.randn(2, 5), torch.tensor([1, 2])
    for _ in range(3):
        ranges.take("cross_entropy", labels, scores, 1, -100)
    labels += 1
    ranges.take("cross_entropy", labels, scores, 1, -100)
    ranges.take("cross_entropy", labels, scores[:, :2], 1, -100)  # must fit something smaller
    (ring,) = ranges._rings.values()
    assert len(ring.calls) == 3
    ranges._state.steps += 1
    ranges.take("cross_entropy", labels, scores, 1, -100)
    assert len(ring.calls) == 4


def test_it_works_in_inference_mode_and_for_what_was_made_there(ranges: IndexedCalls) -> None:
    with torch.inference_mode():
        labels = torch.tensor([1, 7])
        ranges.take("cross_entropy", labels, torch.randn(2, 5), 1, -100)
    ranges.take("cross_entropy", torch.tensor([1, 2]), torch.randn(2, 5), 1, -100)
    ranges.take("cross_entropy", labels, torch.randn(2, 5), 1, -100)
    misfit = ranges.first_misfit()
    assert misfit is not None
    assert misfit[1:] == (1, 7)


def test_other_indices_are_left_alone(ranges: IndexedCalls) -> None:
    ranges.take("cross_entropy", torch.rand(2, 5), torch.randn(2, 5), 1, -100)  # probabilities of classes
    ranges.take("cross_entropy", torch.empty(0, dtype=torch.int64), torch.randn(0, 5), 1, -100)
    ranges.take("embedding", torch.tensor([1], dtype=torch.uint8), torch.randn(5, 2), 0, None)
    assert not ranges._rings


def test_an_error_of_the_script_s_own_is_described_as_ever(ranges: IndexedCalls) -> None:
    ranges.take("cross_entropy", torch.tensor([9]), torch.randn(1, 5), 1, -100)
    facts = describe_end(ValueError("no such metric"), ranges)
    assert facts is not None
    assert (facts.type, facts.call) == ("ValueError", None)
    assert describe_end(None, ranges) is None
    assert not device.has_failed()


def test_an_error_that_the_script_caught_or_wrapped_is_still_what_ended_it(ranges: IndexedCalls) -> None:
    ranges.take("cross_entropy", torch.tensor([9]), torch.randn(1, 5), 1, -100)
    try:
        try:
            raise torch.AcceleratorError(MESSAGE)
        except RuntimeError as error:
            raise ValueError("training failed") from error
    except ValueError as error:
        facts = describe_end(error, ranges)
    assert facts is not None
    assert (facts.type, facts.call) == ("AcceleratorError", "cross_entropy")
    facts = describe_end(None, ranges)  # it has ended by `sys.exit(1)`
    assert facts is not None
    assert (facts.type, facts.step) == ("AcceleratorError", 7)


def test_what_a_compiled_model_is_given_fits_its_largest_table(ranges: IndexedCalls) -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.ModuleList([nn.Embedding(50, 4)]))
    ranges._registry.add(model[1][0].weight).name = "1.0.weight"
    targets = torch.tensor([-1, 49])  # below 0: a label that is ignored
    ranges.take_inputs([targets], model)
    ranges.take_inputs([torch.rand(3)], model)
    ranges.take_inputs([torch.tensor([99])], nn.Linear(2, 2))  # has no table
    ranges._state.steps = 8
    ranges.take_inputs([torch.tensor([0])], model)
    assert ranges.first_misfit() is None
    tokens = torch.tensor([7, 50])
    ranges.take_inputs([tokens], model)
    cause, step, summary = first_finding(crashed(ranges))
    assert (cause, step) == ("device.assert", 8)
    assert "`tokens` goes into the compiled model at " in summary
    assert "from 7 to 50; a table in the model (`1.0.weight`) has 50 rows" in summary


def test_a_smaller_table_is_the_one_that_no_earlier_input_of_a_compiled_model_went_beyond(ranges: IndexedCalls) -> None:
    words, kinds, positions = nn.Embedding(20, 2), nn.Embedding(3, 2), nn.Embedding(64, 2)
    model = nn.ModuleList([positions, words, kinds])
    ranges._registry.add(words.weight).name = "words.weight"
    ranges.take_inputs([torch.tensor([0, 19])], model)  # beyond the table of 3 rows: it is not for this one
    ranges._state.steps = 8
    tokens = torch.tensor([5, 20])
    ranges.take_inputs([tokens], model)
    cause, step, summary = first_finding(crashed(ranges))
    assert (cause, step) == ("device.assert", 8)
    assert "`tokens` goes into the compiled model at " in summary
    assert "from 5 to 20; a table in the model (`words.weight`) has 20 rows" in summary
