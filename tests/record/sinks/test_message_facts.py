"""What a message reports of the run so far."""

from __future__ import annotations

from pathlib import Path

from sink_batches import INF, NAN, event, step

from surefoot.record.messages import Batch
from surefoot.record.progress_alarms import STALLED
from surefoot.record.sinks.message_facts import MessageFacts


def followed(*batches: Batch) -> MessageFacts:
    facts = MessageFacts()
    for batch in batches:
        facts.add(batch)
    return facts


def test_before_the_first_step_nothing_is_known():
    facts = MessageFacts()
    assert facts.sentence() == "no step yet"
    assert facts.picture() is None
    assert facts.fields()["seconds"] is None


def test_first_last_and_lowest_loss_are_those_of_applied_steps():
    facts = followed(Batch([step(0, 4.0), step(1, 1.0), step(2, 0.5, skipped=True), step(3, 2.0)]))
    fields = facts.fields()
    assert (fields["first_loss"], fields["loss"], fields["lowest_loss"]) == (4.0, 2.0, 1.0)
    assert (fields["step"], fields["steps"], fields["seconds"]) == (3, 4, 3.0)
    assert facts.sentence() == "step 3; loss 2 (at first 4, lowest 1)"


def test_a_loss_that_is_not_finite_is_reported_since_its_first_step_and_until_it_is_finite_again():
    broken = followed(Batch([step(0, 3.0), step(1, NAN), step(2, INF)]))
    assert broken.fields()["nonfinite_since"] == 1
    assert broken.sentence() == "step 2; loss nan since step 1; last finite loss 3 (at first 3, lowest 3)"
    broken.add(Batch([step(3, 2.0)]))
    assert broken.fields()["nonfinite_since"] is None


def test_the_optimizer_that_stepped_first_represents_the_run():
    facts = followed(Batch([step(0, 1.0, "generator"), step(7, 9.0, "discriminator"), step(1, 0.5, "generator")]))
    assert (facts.fields()["step"], facts.fields()["loss"], facts.fields()["steps"]) == (1, 0.5, 2)


def test_events_are_counted_by_kind_and_information_is_not():
    happened = [event("skip", severity="warning"), event("skip", severity="warning"), event("skip", severity="info")]
    facts = followed(Batch([step(4)], events=[*happened, event("checkpoint", 3), event("end", 4, "the end")]))
    assert facts.fields()["events"] == {"skip": 2}
    assert facts.ended is not None
    assert facts.sentence().endswith("2 skips; last checkpoint at step 3")


def test_what_was_dropped_is_added_up():
    lost = [event("drops", evidence={"dropped": 5}), event("alarm", cause="sink.dropped", evidence={"dropped": 2})]
    facts = followed(Batch([step(0)], events=[*lost, event("drops", evidence={"dropped": "many"})]))
    assert facts.fields()["dropped"] == 8
    assert "8 rows or messages were dropped" in facts.sentence()


def test_a_run_is_stalled_from_the_alarm_to_the_next_step():
    facts = followed(Batch([step(0)], events=[event("alarm", cause=STALLED, severity="warning")]))
    assert facts.stalled
    facts.add(Batch([step(1)]))
    assert not facts.stalled


def test_the_command_names_the_folder_once_it_is_known():
    facts = MessageFacts()
    assert facts.command == ""
    facts.folder = Path("runs/my run")
    assert facts.command == "surefoot report 'runs/my run'"
