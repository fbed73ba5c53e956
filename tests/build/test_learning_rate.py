import pytest
import torch
from torch import nn

from surefoot.build import suggest_lr


def test_a_suggestion_has_a_range_and_a_source_for_names_classes_and_instances():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    for asked in (optimizer, torch.optim.AdamW, "adamw", "Adam"):
        suggestion = suggest_lr(asked, "language")
        assert suggestion.low < suggestion.start < suggestion.high
        assert "arXiv" in suggestion.source


def test_a_pair_nobody_documents_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="find_lr"):
        suggest_lr("lbfgs", "vision")
    with pytest.raises(ValueError, match="adam"):
        suggest_lr("sgd", "gan")
    with pytest.raises(ValueError, match="one of vision"):
        suggest_lr("sgd", "cooking")
