"""What was found, as a sentence."""

import json

import torch
from torch import nn

from surefoot import find_nonfinite
from surefoot.replay.locate.describe import Counts, describe
from surefoot.replay.locate.frames import Place
from surefoot.replay.locate.memory_writes import MemoryWrite
from surefoot.replay.locate.result import as_data, make_result


def test_an_operation_is_named_with_its_line_its_inputs_and_the_way():
    record = MemoryWrite(
        3, "aten.log.default", "forward", Counts(negative_inf=2), 4, Place("/nowhere/train.py", 7, "loss"), "head"
    )
    record.inputs = (describe("arg 0", torch.tensor([0.0, 1.0])),)
    end = MemoryWrite(9, "aten.mean.default", "forward", Counts(negative_inf=1), 1)
    found = make_result(record, [record, end], ["loss", "the gradient of `w`"], ["rows"])
    assert str(found) == (
        "aten.log.default in `head` (forward) made 2 -Inf of 4 values at /nowhere/train.py:7 in `loss`; inputs: arg 0 "
        "float32 [2] 0 .. 1 (1 zero) (rows). Passed on by: log -> mean -> loss. Reached: loss, the gradient of `w`"
    )
    assert found.path == ("log", "mean", "loss")


def test_backward_names_its_node():
    record = MemoryWrite(
        3, "aten.div.Tensor", "backward", Counts(inf=1), 1, node="SqrtBackward0", forward_op="aten.sqrt.default"
    )
    found = make_result(record, [record], ["the gradient of `w`"], [])
    assert found.op == "SqrtBackward0 -> aten.div.Tensor"
    assert found.file == ""


def test_a_tensor_that_was_bad_before_is_named_as_such():
    record = MemoryWrite(-1, "parameter emb.weight", "input", Counts(nan=1), 4)
    record.inputs = (describe("the parameter `emb.weight`", torch.tensor([float("nan")])),)
    found = make_result(record, [record], ["loss"], [])
    assert found.tensor == "emb.weight"
    assert str(found).startswith("the parameter `emb.weight` has 1 NaN before any operation: float32 [1] (1 NaN)")


def test_a_long_way_is_shortened():
    way = [MemoryWrite(i, f"aten.op{i}.default", "forward", Counts(nan=1), 1) for i in range(20)]
    assert "… 13 more" in str(make_result(way[0], way, ["loss"], []))


def test_the_fields_are_words_and_numbers():
    model = nn.Linear(2, 1)
    found = find_nonfinite(lambda: (model(torch.ones(1, 2)) * 0).log().sum() * 0, model=model)
    data = as_data(found)
    assert json.loads(json.dumps(data)) == data
    assert data["op"].startswith("aten.log")
    assert data["text"] == str(found)
    assert data["outcomes"][0] == "loss"
    assert as_data(None) is None
