"""Following a run while it is written: nothing twice, nothing missed, and a word when it begins anew."""

import shutil

from runlogs import event, layer_rows, step_row
from surefoot.record.follow import RunFollower
from surefoot.record.limits import LogLimits
from surefoot.record.log import RunLog
from surefoot.record.messages import Batch
from surefoot.record.reading import load_run
from surefoot.record.store import Store


def steps(news):
    return news.scalars["step"].to_pylist()


def test_what_is_new_is_given_once(tmp_path):
    follower = RunFollower(tmp_path)
    assert not follower.poll()
    store = Store(tmp_path, LogLimits())
    store.write(Batch([step_row(0)], [layer_rows(0)], events=[event(0)]))
    first = follower.poll()
    assert (steps(first), len(first.events), first.layers.num_rows, first.restarted) == ([0], 1, 5, True)
    assert not follower.poll()
    store.write(Batch([step_row(1), step_row(2, signals={"kl": 1.0})], events=[event(2)]))
    more = follower.poll()
    assert (steps(more), [each.step for each in more.events], more.restarted) == ([1, 2], [2], False)
    assert more.layers.schema.names == first.layers.schema.names
    store.close()
    assert not follower.poll()


def test_polling_through_full_and_thinned_files_gives_every_row_once(tmp_path):
    follower, store, got, restarts = RunFollower(tmp_path), Store(tmp_path, LogLimits(scalars_bytes=1 << 19)), [], 0
    for start in range(0, 20_000, 100):
        store.write(Batch([*map(step_row, range(start, start + 100))]))
        news = follower.poll()
        restarts += news.restarted
        got += steps(news)
    store.close()
    assert (got, restarts) == (list(range(20_000)), 1)


def test_one_who_looks_seldom_is_given_everything_anew(tmp_path):
    follower, store = RunFollower(tmp_path), Store(tmp_path, LogLimits(scalars_bytes=1 << 18))
    store.write(Batch([*map(step_row, range(100))]))
    follower.poll()
    for start in range(100, 10_000, 100):
        store.write(Batch([*map(step_row, range(start, start + 100))]))
    news = follower.poll()
    assert news.restarted
    assert (steps(news)[0], steps(news)[-1]) == (0, 9999)
    store.close()


def test_a_resumed_session_begins_again_without_what_it_superseded(tmp_path):
    follower = RunFollower(tmp_path)
    for first in (0, 6):
        store = Store(tmp_path, LogLimits())
        store.write(Batch([*map(step_row, range(first, first + 10))]))
        news = follower.poll()
        assert news.restarted
        store.close()
    assert steps(news) == list(range(16))


def test_alarms_of_steps_that_a_later_session_superseded_are_not_given(tmp_path):
    for first in (0, 6):
        with RunLog(tmp_path, device_seconds=None) as log:
            for step in range(first, first + 10):
                log.take(step_row(step))
            log.event("alarm", first + 9, f"an alarm at step {first + 9}", severity="warning")
    told = [event.summary for event in RunFollower(tmp_path).poll().events if event.event == "alarm"]
    assert told == ["an alarm at step 15"]
    assert told == [event.summary for event in load_run(tmp_path).events if event.event == "alarm"]


def test_a_folder_that_is_deleted_and_filled_again_begins_again(tmp_path):
    folder = tmp_path / "run"
    follower = RunFollower(folder)
    for _ in range(2):
        store = Store(folder, LogLimits())
        store.write(Batch([*map(step_row, range(5))], events=[event(1)]))
        news = follower.poll()
        assert (steps(news), len(news.events), news.restarted) == (list(range(5)), 1, True)
        store.close()
        shutil.rmtree(folder)
        gone = follower.poll()
        assert (gone.restarted, steps(gone)) == (True, [])
        assert not follower.poll()


def test_a_line_that_is_still_being_written_is_given_when_it_is_whole(tmp_path):
    follower = RunFollower(tmp_path)
    line = '{"event": "spike", "step": 4, "summary": "high", "time": 1.0}\n'
    with (tmp_path / "events.jsonl").open("w") as file:
        file.write(line + line[:20])
        file.flush()
        assert [each.step for each in follower.poll().events] == [4]
        file.write(line[20:])
        file.flush()
        assert [each.step for each in follower.poll().events] == [4]
