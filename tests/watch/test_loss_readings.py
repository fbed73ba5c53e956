"""On a CPU every loss is known at once. What a device changes is shown in `tests/gpu`."""

import torch

from surefoot.watch.loss_readings import LossPlace, LossReadings


def test_a_loss_on_a_cpu_is_known_at_once_at_every_step():
    readings = LossReadings()
    for step in (0, 15, 16, 5_000):
        place = LossPlace(step=step, backward=step, line=None, is_repeated=False)
        assert readings.read(torch.tensor(0.5 + step), place) == (0.5 + step, None)
    assert list(readings.late(wait=True)) == []
