"""Which readings of a device are reported, and how often."""

from __future__ import annotations

import pytest

from surefoot.observe.device import DeviceReading
from surefoot.observe.device_alarms import LASTING_READINGS, THROTTLING, XIDS, DeviceAlarms


def reading(source="cuda:0", xids=(), **numbers):
    return DeviceReading(0.0, source, 7, numbers, xids)


def told(*readings):
    """What is told after each reading, one after the other."""
    alarms = DeviceAlarms()
    return [alarms.take([each]) for each in readings]


def test_new_uncorrectable_errors_are_an_error_and_old_ones_are_not():
    first, second, third = told(
        reading(ecc_uncorrected=5.0), reading(ecc_uncorrected=7.0), reading(ecc_uncorrected=7.0)
    )
    assert first == third == []
    assert second[0].severity == "error"
    assert second[0].evidence == {"source": "cuda:0", "new": 2, "total": 7}


def test_corrected_errors_are_the_hardware_doing_its_work():
    assert told(reading(ecc_corrected=0.0), reading(ecc_corrected=90.0)) == [[], []]


@pytest.mark.parametrize("number", sorted(XIDS))
def test_every_known_driver_error_is_reported_with_its_meaning(number):
    (notices,) = told(reading(xids=(number, number)))
    assert len(notices) == 1
    assert f"XID {number}, {XIDS[number]}" in notices[0].summary
    assert notices[0].evidence["times"] == 2


def test_an_error_of_a_program_is_a_warning_and_a_lost_card_an_error():
    ((program,), (lost,), (unknown,)) = told(reading(xids=(31,)), reading(xids=(79,)), reading(xids=(999,)))
    assert (program.severity, lost.severity, unknown.severity) == ("warning", "error", "error")


@pytest.mark.parametrize("bit", THROTTLING)
def test_throttling_that_lasts_is_reported_once_per_episode(bit):
    hot, cool = reading(throttle=float(bit | 0x8), temperature=92.0), reading(throttle=0.0)
    episode = [hot] * (LASTING_READINGS + 4)
    notices = told(*episode, cool, *episode)
    assert [i for i, each in enumerate(notices) if each] == [
        LASTING_READINGS - 1,
        len(episode) + 1 + LASTING_READINGS - 1,
    ]
    assert notices[LASTING_READINGS - 1][0].evidence["temperature"] == 92.0
    assert THROTTLING[bit] in notices[LASTING_READINGS - 1][0].summary


@pytest.mark.parametrize("bits", [0x1, 0x2, 0x4, 0x8, 0x10, 0x100, 0x1 | 0x4])
def test_idle_clocks_and_power_caps_are_normal(bits):
    assert not any(told(*[reading(throttle=float(bits), sm_clock=210.0)] * 20))


def test_a_moment_of_heat_is_normal():
    hot, cool = reading(throttle=float(0x20)), reading(throttle=0.0)
    assert not any(told(hot, hot, cool, hot, hot, cool))


def test_full_memory_is_reported_once_until_it_was_freed():
    full, nearly, free = (reading(memory_used=used, memory_total=100.0) for used in (98.0, 95.0, 50.0))
    notices = told(nearly, full, full, nearly, full, free, full)
    assert [len(each) for each in notices] == [0, 1, 0, 0, 0, 0, 1]
    assert notices[1][0].severity == "info"


def test_a_host_that_runs_out_of_memory_is_a_warning():
    ((notice,),) = told(reading("host", host_used=99.0, host_total=100.0))
    assert notice.severity == "warning"
    assert "may end the process" in notice.summary


def test_cards_are_followed_one_by_one():
    alarms = DeviceAlarms()
    alarms.take([reading("cuda:0", ecc_uncorrected=0.0), reading("cuda:1", ecc_uncorrected=9.0)])
    (notice,) = alarms.take([reading("cuda:0", ecc_uncorrected=1.0), reading("cuda:1", ecc_uncorrected=9.0)])
    assert notice.evidence["source"] == "cuda:0"


def test_a_reading_without_numbers_is_no_alarm():
    assert told(reading(), reading("host")) == [[], []]
