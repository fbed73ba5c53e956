"""Whether a bad value was in the data or was made on the way: what is claimed follows from what was seen."""

import math
import weakref
from dataclasses import replace

import pytest
import torch

from surefoot.record.facts import DrawnBatch, NonFiniteLoss, UngraphedCall
from surefoot.watch.data_origin import DataOrigin, draws_ahead, is_finite, origin_of_data, place_of

LOSS = NonFiniteLoss(value=math.nan, kind="data", shape=[8, 3], site="train.py:9", module="net", call="linear", nan=2)
CONSUMER = ("train.py:9", "net", "linear")
LOG = UngraphedCall(call="log", site="train.py:5", module="", bad=True, given_finite=True)
WHOLE = torch.ones(100, 3)
"""All the data, of which a step takes a part."""


def way(**more):
    given = {"consumer": CONSUMER, "shape": [8, 3], "risky": [], "from_model": False, "sources": [weakref.ref(WHOLE)]}
    return DataOrigin(**given | more)


def found(*known, facts=LOSS, tensor=None, here=True, drawn=()):
    return origin_of_data(facts, tensor, known, here, list(drawn))


def test_an_operation_that_made_it_of_finite_values_in_this_step_is_named_for_certain():
    made = found(way(risky=[LOG]))
    assert (made.kind, made.exact, made.without_graph, made.made_by) == ("operation", True, True, LOG)


def test_the_first_of_several_bad_operations_made_it():
    later = replace(LOG, call="sqrt", site="train.py:6", given_finite=False)
    assert found(way(risky=[LOG, later])).made_by == LOG


def test_data_that_were_not_finite_when_they_came_in_are_data():
    spoiled = WHOLE.clone()
    spoiled[4, 1] = math.nan
    made = found(way(sources=[weakref.ref(spoiled)]))
    assert (made.kind, made.came_in_finite, made.made_by) == ("data", False, None)


def test_a_batch_of_the_loader_that_is_not_finite_is_data():
    made = found(way(sources=[], readable=False), drawn=[(torch.full((8, 3), math.inf), torch.zeros(8))])
    assert (made.kind, made.came_in_finite) == ("data", False)


def test_finite_data_and_a_bad_tensor_that_is_held_mean_an_unknown_operation_on_the_way():
    tensor = torch.full((8, 3), math.nan)
    made = found(way(), tensor=tensor)
    assert (made.kind, made.exact, made.made_by) == ("operation", False, None)


def test_random_numbers_that_hold_a_nan_in_a_later_step_are_data():
    assert found(way(sources=[]), tensor=torch.full((8, 3), math.nan), here=False).kind == "data"


def test_without_the_tensor_an_overflow_would_look_the_same_and_nothing_is_claimed():
    assert found(way()) == LOSS


def test_what_a_model_made_is_not_called_data():
    made = found(way(from_model=True))
    assert (made.kind, made.from_model) == ("unknown", True)


def test_in_a_later_step_what_was_bad_in_the_sampled_one_is_a_mask_and_not_the_cause():
    mask = replace(LOG, call="masked_fill", bad=True)
    calm = replace(LOG, bad=False)
    made = found(way(risky=[mask, calm]), here=False)
    assert (made.kind, made.exact, made.made_by) == ("operation", False, calm)
    assert made.passed == ["log at train.py:5"]


def test_of_several_operations_in_a_later_step_the_last_is_the_likely_one():
    first, last = replace(LOG, bad=False), replace(LOG, call="sqrt", site="train.py:6", bad=False)
    assert found(way(risky=[first, last]), here=False).made_by == last
    unsure = [replace(first, bad=True, given_finite=None), replace(last, bad=True, given_finite=None)]
    assert found(way(risky=unsure), here=True).made_by == unsure[0]


def test_minus_infinity_after_a_logarithm_was_made_by_it_though_the_data_are_unknown():
    facts = replace(LOSS, nan=None, minus_inf=2)
    calm = replace(LOG, bad=False)
    unknown = way(risky=[calm], sources=[], readable=False)
    assert found(unknown, facts=facts, here=False).made_by == calm
    assert found(unknown, facts=replace(facts, nan=1), here=False).made_by is None


def test_the_way_is_matched_by_memory_before_the_place_and_by_the_place_before_the_size():
    tensor = torch.zeros(8, 3)
    by_memory = way(risky=[LOG], consumer=("", "", ""), shape=[1], storage=place_of(tensor))
    by_size = way(risky=[replace(LOG, call="sqrt")], consumer=("other.py:1", "", ""))
    by_place = way(risky=[replace(LOG, call="acos")])
    assert found(by_size, by_place, by_memory, tensor=tensor).made_by.call == "log"
    assert found(by_size, by_place, tensor=tensor).made_by.call == "acos"
    assert found(by_size, tensor=tensor).made_by.call == "sqrt"


def test_a_place_that_is_not_known_is_filled_in_by_the_way():
    made = found(way(), facts=replace(LOSS, site=None, module=None, call=None))
    assert (made.site, made.module, made.call) == CONSUMER


def test_nothing_known_is_nothing_claimed():
    assert found() == LOSS


@pytest.mark.parametrize(
    ("shape", "batch"), [([8, 3], torch.ones(5, 3)), ([8, 40], torch.ones(8)), ([8, 3], torch.tensor(1.0))]
)
def test_a_finite_batch_of_other_rows_or_far_fewer_values_proves_nothing(shape, batch):
    made = found(
        way(shape=shape, sources=[], readable=False),
        facts=replace(LOSS, shape=shape),
        tensor=torch.zeros(shape),
        drawn=[batch],
    )
    assert (made.kind, made.came_in_finite) == ("data", None)


def test_a_finite_batch_with_the_same_rows_is_where_it_came_from():
    made = found(way(sources=[], readable=False), tensor=torch.zeros(8, 3), drawn=[torch.ones(8, 3)])
    assert (made.kind, made.exact) == ("operation", False)


def test_finite_is_what_can_be_read_and_holds_no_nan():
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0))
    assert is_finite(torch.full((4,), 3e38))  # their sum is not
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert is_finite(torch.full((2, 2), math.nan).to_sparse())


def test_views_lie_in_the_place_of_their_base():
    base = torch.zeros(4, 4)
    assert place_of(base[1:]) == place_of(base) is not None
    assert place_of(base.clone()) != place_of(base)
    assert place_of(torch.empty(2, device="meta")) is None
    assert place_of(base.to_sparse()) is None


def test_a_batch_that_is_not_finite_is_data_though_the_first_step_made_its_data_of_nothing():
    drawn = [(torch.full((8, 3), math.nan), torch.zeros(8))]
    made = found(way(sources=[]), tensor=drawn[0][0], here=False, drawn=drawn)
    assert (made.kind, made.came_in_finite, made.made_by) == ("data", False, None)


MADE_AFTER_THE_OPTIMIZER = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
rows = torch.randn(40, 32, 8)
rows[30, 3, 5] = float("nan")
for x in rows:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_data_made_while_the_first_step_was_sampled_is_still_data_in_a_later_one(watch):
    watch(MADE_AFTER_THE_OPTIMIZER).names_first("data.nonfinite-input", step=30, at="|model(x)", evidence=set())


DRAWN_AHEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
rows = torch.randn(640, 8)
rows[500, 5] = float("nan")


def one_ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


for x in one_ahead(DataLoader(rows, 16)):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_a_batch_that_was_drawn_ahead_is_not_taken_for_that_of_the_step(watch):
    watch(DRAWN_AHEAD).names_first("data.nonfinite-input", step=31, at="|model(x)", evidence=set())


def test_a_loop_that_looks_at_all_the_data_first_does_not_draw_ahead():
    def drawn(*backwards, iteration=1):
        given = {"loader": 0, "step": 0, "size": 4, "fingerprint": 0, "grad_mode": True}
        return [DrawnBatch(iteration=iteration, backward=backward, **given) for backward in backwards]

    assert draws_ahead(drawn(0, 0, 1, 2))
    assert not draws_ahead(drawn(0, 1, 2))
    assert not draws_ahead(drawn(0, 0, 0, 0) + drawn(0, 1, 2, iteration=2))
    assert not draws_ahead(drawn(0) + drawn(0, 1, iteration=2))
