"""The order of the data: sorted rows, batches that come again, one batch unlike the others."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from recorded import SITE, run
from surefoot.diagnose.rules import data_order
from watched import CLASSES, NET

if TYPE_CHECKING:
    from watched import Nursery


def notes(batches: list[dict[str, int]]) -> dict[str, Any]:
    held = [
        {"step": i, "backward": i + 1, "line": 0, "x": i, "y": i, "size": 32, "labels": b}
        for i, b in enumerate(batches)
    ]
    return {"notes": held, "rows": {}}


def test_batches_of_one_label_each_in_order_are_unshuffled() -> None:
    batches = [{str(i // 5 % 8): 32} for i in range(80)]
    claim = data_order.unshuffled(run(stream=notes(batches)))
    assert claim is not None
    assert claim.evidence["neighbour_overlap"] > 0.7


@pytest.mark.parametrize("size", [64, 96, 100, 128])
def test_sorted_rows_are_unshuffled_if_a_batch_is_about_as_large_as_a_class(size: int) -> None:
    labels = [str(row // 96) for row in range(960)] * 5
    batches = [dict(Counter(labels[start : start + size])) for start in range(0, len(labels), size)]
    claim = data_order.unshuffled(run(stream=notes(batches)))
    assert claim is not None
    assert claim.evidence["labels"] == 10


def test_batches_of_one_class_each_in_random_order_are_meant() -> None:
    chooser = random.Random(0)
    batches = [{str(c): 32} for _ in range(8) for c in chooser.sample(range(10), 10)]
    assert data_order.unshuffled(run(stream=notes(batches))) is None


def test_rows_sorted_by_their_labels_are_unshuffled_rather_than_the_same_shuffle_again(watch: Nursery) -> None:
    loop = """
    for epoch in range(6):
        for rows in y.argsort().split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    """
    assert watch(CLASSES, NET, loop).causes[:1] == ["data.unshuffled"]


def test_batches_of_a_few_classes_drawn_at_random_are_meant() -> None:
    chooser = random.Random(0)
    batches = [{str(c): 8 for c in chooser.sample(range(10), 4)} for _ in range(80)]
    assert data_order.unshuffled(run(stream=notes(batches))) is None


def test_mixed_batches_are_fine() -> None:
    chooser = random.Random(0)
    batches = []
    for _ in range(60):
        drawn = [str(chooser.randrange(5)) for _ in range(32)]
        batches.append({label: drawn.count(label) for label in set(drawn)})
    assert data_order.unshuffled(run(stream=notes(batches))) is None


def test_targets_that_rise_through_the_epoch_are_sorted() -> None:
    held = [
        {"step": i, "backward": i + 1, "line": 0, "y": i % 20, "y_mean": float(i % 20), "y_std": 0.3} for i in range(60)
    ]
    assert data_order.unshuffled(run(stream={"notes": held, "rows": {}})) is not None
    random.Random(1).shuffle(held)
    assert data_order.unshuffled(run(stream={"notes": held, "rows": {}})) is None


# ── again and again ──────────────────────────────────────────────────────────────────────────────────────────────────


def loader(**more: Any) -> dict[str, Any]:
    base = {"number": 0, "batch_size": 64, "sampler": "SequentialSampler", "workers": 0, "rows": 1400, "batches": 22}
    return base | {"iterations": 1, "drawn": 0, "site": SITE} | more


def drawn(prints: list[int], per_iteration: int) -> list[dict[str, Any]]:
    return [
        {
            "loader": 0,
            "iteration": 1 + i // per_iteration,
            "step": i,
            "backward": i,
            "size": 64,
            "print": p,
            "grad": True,
        }
        for i, p in enumerate(prints)
    ]


def test_a_loader_opened_at_every_step_gives_its_first_batch_indefinitely() -> None:
    facts = {"loaders": [loader(iterations=100, drawn=100)], "batches": drawn([7] * 100, 1)}
    claim = data_order.repeated_batches(run(**facts))
    assert claim is not None
    assert claim.where == (SITE,)


def test_a_loader_of_one_full_batch_is_fine() -> None:
    facts = {"loaders": [loader(batches=1, rows=64, iterations=100, drawn=100)], "batches": drawn([7] * 100, 1)}
    assert data_order.repeated_batches(run(**facts)) is None


def test_a_fixed_order_without_a_shuffle_is_fine() -> None:
    facts = {"loaders": [loader(iterations=5, drawn=100)], "batches": drawn(list(range(20)) * 5, 20)}
    assert data_order.repeated_batches(run(**facts)) is None


def test_rows_that_occur_several_times_in_the_data_are_no_repeats_of_the_loader() -> None:
    alike = drawn([i % 40 for i in range(240)], 240)
    once = loader(sampler="RandomSampler", rows=240, batches=240, batch_size=1)
    assert data_order.repeated_batches(run(loaders=[once], batches=alike)) is None
    stream = loader(sampler="_InfiniteConstantSampler", rows=None, batches=None, workers=6)
    assert data_order.repeated_batches(run(loaders=[stream], batches=alike)) is not None


def test_a_dataset_that_ignores_its_index_is_found() -> None:
    same = loader(sampler="RandomSampler", rows=240, batches=240, batch_size=1)
    assert data_order.repeated_batches(run(loaders=[same], batches=drawn([7] * 240, 240))) is not None


WEIGHTED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(0)
x = torch.randn(400, 8)
y = (x[:, 0] > 0.8).long()
weights = 1 / torch.bincount(y)
sampler = WeightedRandomSampler(CHOSEN, len(x))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for inputs, labels in DataLoader(TensorDataset(x, y), 20, sampler=sampler):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_weights_of_classes_given_to_a_sampler_of_rows_are_named(watch: Nursery) -> None:
    run = watch(WEIGHTED.replace("CHOSEN", "weights"))
    found = run.names_first("data.repeated-batches", step=0, at="|in DataLoader(", evidence={"weights", "rows"})
    assert (found.evidence["weights"], found.evidence["rows"]) == (2, 400)
    assert "one weight for each row" in found.fixes[0]


def test_weights_of_rows_are_fine(watch: Nursery) -> None:
    assert "data.repeated-batches" not in watch(WEIGHTED.replace("CHOSEN", "weights[y]")).causes
    assert "data.repeated-batches" not in watch(WEIGHTED.replace("CHOSEN", "weights[y[:300]]")).causes


def test_a_shuffle_that_is_drawn_again_every_epoch_is_a_repeat() -> None:
    shuffles = [{"step": 20 * e, "length": 1400, "print": 99} for e in range(5)]
    facts = {
        "loaders": [loader(sampler="RandomSampler", iterations=5, drawn=100)],
        "batches": drawn(list(range(20)) * 5, 20),
        "permutations": shuffles,
    }
    claim = data_order.repeated_batches(run(**facts))
    assert claim is not None
    assert claim.evidence["period"] == 20


def test_a_sampler_that_should_shuffle_and_gives_the_same_order_is_a_repeat() -> None:
    facts = {
        "loaders": [loader(sampler="RandomSampler", iterations=5, drawn=100) | {"shuffles": True}],
        "batches": drawn(list(range(20)) * 5, 20),
    }
    claim = data_order.repeated_batches(run(**facts))
    assert claim is not None
    assert claim.evidence["same_order"] == 5
    facts["loaders"][0]["shuffles"] = False
    assert data_order.repeated_batches(run(**facts)) is None


def test_a_generator_made_anew_every_epoch_is_named_with_its_line() -> None:
    held = [{"step": i, "backward": i + 1, "line": 0, "x": i % 20, "y": i % 20} for i in range(100)]
    seeds = {"numpy.random.default_rng(3) at train.py:8": [0, 20, 40, 60, 80]}
    claim = data_order.repeated_batches(run(stream={"notes": held, "rows": {}}, reseeds=seeds))
    assert claim is not None
    assert claim.where == ("train.py:8",)
    assert data_order.repeated_batches(run(stream={"notes": held, "rows": {}})) is None


ONE_BATCH = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 8)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=20, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
inputs, labels = next(iter(loader))
for step in range(40):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
with torch.no_grad():
    EVALUATE
"""


def test_one_batch_that_is_trained_on_for_good_is_named_if_other_rows_are_evaluated(watch: Nursery) -> None:
    evaluated = ONE_BATCH.replace("EVALUATE", "print((model(x[200:]).argmax(1) == y[200:]).float().mean())")
    found = watch(evaluated).names_first(
        "data.repeated-batches", step=1, at="|next(iter(", evidence={"drawn", "batches", "steps"}
    )
    assert "20 of 200 rows" in found.summary
    checked = ONE_BATCH.replace("EVALUATE", "print((model(inputs).argmax(1) == labels).float().mean())")
    assert watch(checked).causes == []  # whether a model can learn one batch is a usual check


NOISED = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(torch.randn(640, 6), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = iter(loader)
rows = next(batches)
for step in range(120):
    NEXT
    noise = torch.randn(32, 6)
    loss = F.mse_loss(model(rows + noise), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_one_batch_with_new_noise_at_every_step_is_a_repeated_batch(watch: Nursery) -> None:
    assert watch(NOISED.replace("NEXT", "")).causes == ["data.repeated-batches"]


def test_a_new_batch_with_new_noise_at_every_step_is_not(watch: Nursery) -> None:
    following = "batches = iter(loader) if step % 19 == 18 else batches; rows = next(batches)"
    assert "data.repeated-batches" not in watch(NOISED.replace("NEXT", following)).causes


SOURCES = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

torch.manual_seed(0)
class Mixture(Dataset):  # each index stands for a source of many rows
    x = torch.randn(600, 8)
    def __len__(self): return len(self.x)
    def __getitem__(self, source):
        row = self.x[200 * source + int(torch.randint(200, ()))]
        return row, row[:3].argmax()
loader = DataLoader(Mixture(), 32, sampler=WeightedRandomSampler([0.5, 0.25, 0.25], 640))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_weights_of_the_sources_of_a_mixture_are_fine(watch: Nursery) -> None:
    assert watch(SOURCES).causes == []


BY_CLASS = """
class ByClass(WeightedRandomSampler):
    def __iter__(self):
        return (3 * int(torch.randint(200, ())) + k for k in super().__iter__())
"""


def test_a_sampler_that_draws_rows_of_the_classes_it_draws_is_fine(watch: Nursery) -> None:
    by_row = SOURCES.replace("200 * source + int(torch.randint(200, ()))", "source")
    drawn = by_row.replace("sampler=WeightedRandomSampler(", "sampler=ByClass(").replace(
        "loader = ", f"{BY_CLASS}loader = "
    )
    assert watch(drawn).causes == []
