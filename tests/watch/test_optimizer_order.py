"""An optimizer that steps once for many steps of another is sampled too."""

import weakref

import torch

from surefoot.watch.context import SchedulerRecord
from surefoot.watch.optimizer_order import OptimizerOrder, follow
from surefoot.watch.optimizer_record import OptimizerRecord


def records(*sampled):
    """A record for each number of sampled steps; the optimizers have stepped eight times each."""
    made = []
    for number, count in enumerate(sampled):
        record = OptimizerRecord(number, torch.optim.SGD([torch.ones(1)]), "", 0, lambda row: None)
        record.sampled_steps, record.series.count = count, 8
        made.append(record)
    return made


def told(order, optimizers, steps):
    return [order.is_rare_next(optimizers[number], optimizers) for number in steps]


def test_the_end_of_a_streak_is_predicted_from_the_streak_before():
    order, optimizers = OptimizerOrder(), records(50, 0)
    assert not any(told(order, optimizers, [0, 0, 0, 0, 0, 1]))  # the first five are counted
    assert told(order, optimizers, [0, 0, 0, 0, 0]) == [False] * 4 + [True]


def test_streaks_of_varying_length_predict_only_their_last_length():
    order, optimizers = OptimizerOrder(), records(50, 0)
    told(order, optimizers, [0, 0, 0, 1, 0, 0, 1])
    assert told(order, optimizers, [0, 0, 0]) == [False, True, False]


def test_one_that_was_sampled_often_enough_needs_no_extra_step():
    order, optimizers = OptimizerOrder(), records(50, 7)  # 4 + log2(8) = 7
    told(order, optimizers, [0, 0, 0, 1])
    assert told(order, optimizers, [0, 0, 0]) == [False] * 3


def test_one_that_has_never_stepped_is_not_waited_for():
    order, optimizers = OptimizerOrder(), records(50, 0, 0)
    optimizers[1].series.count = optimizers[2].series.count = 0
    told(order, optimizers, [0, 0, 1])
    assert not any(told(order, optimizers, [0, 0]))


def test_a_single_optimizer_has_no_order():
    order, optimizers = OptimizerOrder(), records(0)
    assert not any(told(order, optimizers, [0] * 5))


def test_a_scheduler_is_followed_and_its_settings_are_those_of_the_first_time():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    record = SchedulerRecord(weakref.ref(scheduler), "StepLR", "train.py:3")
    (owner,) = records(0)
    follow(record, lambda _: owner)
    scheduler.gamma = 0.1
    optimizer.step()
    scheduler.step()
    follow(record, lambda _: owner)
    assert (record.optimizer, record.last_epoch, record.steps) == (0, 1, 2)
    assert record.settings is not None
    assert (record.settings["step_size"], record.settings["gamma"]) == (3, 0.5)
    assert not any(name.startswith("_") for name in record.settings)


def test_a_scheduler_that_is_gone_leaves_the_record_as_it_was():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 3)
    record = SchedulerRecord(weakref.ref(scheduler), "StepLR", "")
    del scheduler
    follow(record, lambda _: records(0)[0])
    assert (record.steps, record.settings) == (0, None)
