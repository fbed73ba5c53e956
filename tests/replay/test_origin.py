"""The first bad operation as plain data that JSON can hold."""

import json

import torch
from torch import nn

from surefoot import find_nonfinite
from surefoot.replay.origin import as_data


def test_the_fields_are_words_and_numbers():
    model = nn.Linear(2, 1)
    found = find_nonfinite(lambda: (model(torch.ones(1, 2)) * 0).log().sum() * 0, model=model)
    data = as_data(found)
    assert json.loads(json.dumps(data)) == data
    assert data["op"].startswith("aten.log")
    assert data["text"] == str(found)
    assert data["outcomes"][0] == "loss"
    assert as_data(None) is None
