"""The queue between the run log and a sink: bounded, never waiting, events outlive rows."""

import threading

from sink_batches import event, step

from surefoot.record.messages import Batch
from surefoot.record.sinks.batch_queue import BatchQueue, size_of


def rows(first, count=2, **more):
    return Batch(steps=[step(first + i) for i in range(count)], **more)


def test_batches_come_out_in_order():
    queue = BatchQueue(capacity=4)
    for first in (0, 2):
        assert queue.put(rows(first)) is False
    assert queue.take(None) == (rows(0), False)
    assert queue.take(None) == (rows(2), False)
    assert queue.take(0.0) == (None, False)


def test_a_full_queue_drops_the_oldest_rows_and_keeps_their_events():
    queue = BatchQueue(capacity=1)
    alarm = event("alarm")
    queue.put(rows(0, events=[alarm]))
    assert queue.put(rows(2)) is True
    batch, _ = queue.take(None)
    assert (batch.steps, batch.events) == (rows(2).steps, (alarm,))
    assert queue.dropped == 2


def test_a_closed_queue_gives_what_waits_and_then_says_that_it_is_over():
    queue = BatchQueue(capacity=4)
    queue.put(rows(0))
    queue.close()
    queue.put(rows(2))
    assert queue.take(None) == (rows(0), False)
    assert queue.take(None) == (None, True)
    assert queue.dropped == 2


def test_giving_up_drops_and_counts_what_waits():
    queue = BatchQueue(capacity=4)
    queue.put(rows(0, count=5))
    queue.give_up()
    assert (queue.take(None), queue.dropped, queue.waiting) == ((None, True), 5, 0)
    assert queue.wait_until_idle(0.0) is False


def test_it_is_idle_only_once_the_batch_that_was_taken_is_delivered():
    queue = BatchQueue(capacity=4)
    queue.put(rows(0))
    queue.take(None)
    assert queue.wait_until_idle(0.0) is False
    assert queue.busy_seconds is not None
    queue.delivered(lost=1)
    assert (queue.wait_until_idle(0.0), queue.busy_seconds, queue.dropped) == (True, None, 1)


def test_whoever_waits_for_a_batch_is_woken_by_one():
    queue, taken = BatchQueue(capacity=4), []
    thread = threading.Thread(target=lambda: taken.append(queue.take(None)))
    thread.start()
    queue.put(rows(0))
    thread.join()
    assert taken == [(rows(0), False)]


def test_the_size_of_a_batch_counts_rows_and_events_of_every_kind():
    assert size_of(rows(0, count=3, events=[event()])) == 4
