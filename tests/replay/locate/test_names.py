"""What the program calls its tensors and modules."""

import torch
from torch import nn

from surefoot.replay.locate.describe import count
from surefoot.replay.locate.names import Names


def setup():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = {"x": torch.ones(3, 2)}

    def step():
        return model(batch["x"]).sum(), optimizer

    return model, optimizer, batch, step


def test_everything_a_step_reaches_has_a_name():
    model, optimizer, batch, step = setup()
    names = Names(step, None)
    assert names.modules == {"": model}
    assert names.optimizers == [optimizer]
    assert names.kinds[id(batch["x"])] == ("input", "batch['x']")
    assert names.kinds[id(model[0].weight)] == ("parameter", "0.weight")
    assert names.kinds[id(model[1].running_mean)] == ("buffer", "1.running_mean")
    assert names.leaf(model[0].weight) == "`0.weight`"
    assert names.leaf(torch.ones(2)) == "a tensor of shape [2]"
    assert names.module(model[1]) == "1"
    assert names.module(nn.ReLU()) == "ReLU"
    assert names.module(None) == ""


def test_what_outlives_the_step_is_listed_with_its_state():
    model, optimizer, batch, step = setup()
    model(batch["x"]).sum().backward()
    optimizer.step()
    kept = [name for name, _, _ in Names(step, None).kept()]
    assert "the parameter `0.weight`" in kept
    assert "the buffer `1.running_mean`" in kept
    assert "`momentum_buffer` of `0.weight` in the optimizer" in kept


def test_parameters_that_only_an_optimizer_knows_are_named_by_their_place():
    parameter = nn.Parameter(torch.ones(1))
    names = Names(lambda: None, None)
    names.add_optimizer(torch.optim.SGD([parameter], lr=0.1))
    assert names.leaf(parameter) == "`param_groups[0]['params'][0]`"


def test_a_bad_tensor_is_an_origin_and_a_mask_is_meant():
    table = torch.ones(4, 2)
    table[2] = float("nan")
    mask = torch.tensor([0.0, float("-inf")])

    def step():
        return table, mask

    names = Names(step, None)
    found = names.record_of(-1, table, table, count(table))
    assert found.op == "input table"
    assert found.notes == ("in row 2",)
    assert not found.meant
    assert names.record_of(-1, mask, mask, count(mask)).meant
