"""One name for each number, the same in every sink."""

import math

import pytest
from sink_batches import event, healthy, histogram, step

from surefoot.errors import SettingError
from surefoot.record.messages import Batch
from surefoot.record.sinks.named_values import BatchReader, digest, encodable, full_name, sentence, shortened


def test_every_kind_of_row_has_its_name():
    reading = BatchReader().read(healthy())
    names = {name for point in reading.points for name in point.values}
    assert names >= {
        "loss",
        "grad_norm",
        "lr",
        "skipped",
        "signal/kl",
        "layer_grad_norm/fc.weight",
        "layer_update_ratio/fc.bias",
        "histogram_weight_nonfinite/fc.weight",
        "device/host/host_used",
        "events/skip",
    }
    assert [placed.item.layer for placed in reading.histograms] == ["fc.weight"]
    assert [placed.step for placed in reading.events] == [4]


def test_the_same_batch_again_counts_nothing_twice():
    reader, batch = BatchReader(), Batch(events=[event()])
    assert reader.read(batch) is reader.read(batch)
    following = reader.read(Batch(events=[event()]))
    assert following.points[-1].values == {"events/skip": 2.0}


def test_thinning_keeps_what_was_skipped_or_not_finite():
    rows = [step(0), step(1), step(2, skipped=True), step(3, math.nan, nonfinite=4.0), step(4), step(10)]
    points = BatchReader(every_steps=10).read(Batch(steps=rows)).points
    assert [point.step for point in points] == [0, 2, 3, 10]


def test_a_step_that_goes_back_is_sent_however_thin():
    reader = BatchReader(every_steps=100)
    points = reader.read(Batch(steps=[step(500), step(20)])).points
    assert [point.step for point in points] == [500, 20]


def test_layers_can_be_left_out():
    points = BatchReader(layers_every_steps=0).read(healthy()).points
    assert not any(name.startswith("layer_") for point in points for name in point.values)


def test_an_event_without_a_step_is_placed_at_the_last_one():
    reading = BatchReader().read(Batch(steps=[step(7)], events=[event(number=None)], histograms=[histogram(7)]))
    assert [placed.step for placed in reading.events] == [7]


@pytest.mark.parametrize("settings", [{"every_steps": 0}, {"layers_every_steps": -1}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SettingError, match="must be"):
        BatchReader(**settings)


def test_long_names_are_cut_and_stay_different():
    one, two = (shortened("layer." * 50 + end, 100) for end in ("a", "b"))
    assert len(one) == len(two) == 100
    assert one != two
    assert shortened("short", 100) == "short"
    assert one.endswith(digest("layer." * 50 + "a"))


def test_texts_can_be_encoded_whatever_they_hold():
    assert full_name("generator", "loss") == "generator/loss"
    assert encodable("a\udcffb").isascii()
    text = sentence(event(summary="NaN \udcff", cause="nonfinite", action="skip"))
    assert text.startswith("step 3: NaN ?")
    assert text.endswith("(cause: nonfinite) Action: skip.")
