"""No object of the script's lives longer because it is watched."""

import shutil
from pathlib import Path

from running import both


def test_every_object_dies_at_the_line_it_dies_at_without_us(tmp_path):
    shutil.copy(Path(__file__).with_name("lifetimes.py"), tmp_path / "script.py")
    plain, watched = both(tmp_path, "script.py")
    assert "alive []" in plain.stdout
    assert "stopped watching" not in watched.stderr


def test_a_loop_without_an_optimizer_leaves_nothing_behind_per_backward(watch):
    run = watch(
        """
        import gc
        import torch

        weight = torch.ones(4, requires_grad=True)

        def held():
            gc.collect()
            found = gc.get_objects()
            floats = [each for each in found if type(each) is list and each and type(each[0]) is float]
            return sum(type(each) is torch.Tensor for each in found), max(map(len, floats))

        for count in (250, 750):
            for _ in range(count):
                (weight - 2).square().sum().backward()
                with torch.no_grad():
                    weight -= 0.001 * weight.grad
                weight.grad = None
            print(*held())
        """
    )
    (tensors, lists), (later, longer) = (map(int, line.split()) for line in run.output.splitlines())
    assert run.facts["steps"] == 1000
    assert later < tensors + 100
    assert longer < lists + 100
