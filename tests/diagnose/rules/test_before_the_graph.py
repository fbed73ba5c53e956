"""Values that operations without a graph made non-finite before the model saw them, and data that came in like that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import FIT, VALUES

if TYPE_CHECKING:
    from watched import Nursery

DATA = VALUES.replace("randn(256, 8)", "rand(512, 8) + 0.1") + "y = x[:, :1] * 2\n"
LATE = 300
"""A row that comes at step 18, at which nobody looks; row 5 comes at step 0."""

LOADED = """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(x, y), batch_size=16)
"""
LOADER_LOOP = """
for a, b in loader:
    PREPARED
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
LOOP = """
for i in torch.arange(512).split(16):
    PREPARED
    loss = F.mse_loss(model(a), b)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
IN_DATASET = """
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 512
    def __getitem__(self, i): return x[i].log(), y[i]
loader = DataLoader(Rows(), batch_size=16)
"""
IN_MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    def forward(self, given):
        given = given.log()
        return self.body(given)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""


def by_loader(prepared: str) -> tuple[str, str, str]:
    return LOADED, FIT, LOADER_LOOP.replace("PREPARED", prepared)


def by_hand(prepared: str) -> tuple[str, str, str]:
    return "", FIT, LOOP.replace("PREPARED", prepared)


MADE = {
    "a logarithm": ("x[ROW, 2] = 0", by_loader("a = torch.log(a)"), "|torch.log"),
    "a logarithm in place": ("x[ROW, 2] = 0", by_loader("a.log_()"), "|a.log_"),
    "a row without a spread": ("x[ROW] = 1.5", by_loader("a = (a - a.mean(1, keepdim=True)) / a.std(1, keepdim=True)"),
                               "|a.std"),
    "the target": ("y[ROW] = 0", by_loader("b = torch.log(b)"), "|torch.log"),
    "no loader": ("x[ROW, 2] = 0", by_hand("a, b = torch.log(x[i]), y[i]"), "|torch.log"),
    "data from NumPy": ("x[ROW, 2] = 0\nrows = x.numpy()",
                        by_hand("a, b = torch.log(torch.from_numpy(rows[i.numpy()])), y[i]"), "|torch.log"),
    "made up as it goes": ("x[ROW, 2] = 0",
                           by_hand("a = torch.rand(16, 8); a[ROW % 16, 2] *= int(i[0] != ROW // 16 * 16); "
                                   "b = a[:, :1] * 2; a = torch.log(a)"), "|torch.log"),
    "the data set": ("x[ROW, 2] = 0", (IN_DATASET, FIT, LOADER_LOOP.replace("PREPARED", "pass")), "|x[i].log"),
    "the model's first line": ("x[ROW, 2] = 0", (LOADED, IN_MODEL, LOADER_LOOP.replace("PREPARED", "pass")),
                               "|given.log"),
}  # fmt: skip


@pytest.mark.parametrize("row", [5, LATE])
@pytest.mark.parametrize("name", MADE)
def test_an_operation_before_the_graph_is_named_and_not_the_data(watch: Nursery, name: str, row: int) -> None:
    fault, parts, line = MADE[name]
    run = watch(*(part.replace("ROW", str(row)) for part in (DATA, fault, *parts)))
    found = run.names_first("loss.undefined-op", step=row // 16, at=line, evidence={"without_graph", "made_by"})
    assert found.confidence > 0.8
    assert "data.nonfinite-input" not in run.causes


def test_an_assignment_that_was_not_seen_is_looked_for_between_the_data_and_the_model(watch: Nursery) -> None:
    prepared = "a[3, 2] = torch.nan if step == 18 else 0.5; step += 1"
    run = watch(DATA, "step = 0", *by_loader(prepared))
    assert run.first.cause == "loss.undefined-op"
    assert "contains 1 NaN in row 3" in run.first.summary
    assert "produced it" in run.first.summary
    assert run.first.fixes[0].startswith(
        "Check with `torch.isfinite` what the script does to the batch before `linear` at"
    )


CAME_IN = {
    "and is standardised": by_loader("a = (a - a.mean(1, keepdim=True)) / a.std(1, keepdim=True)"),
    "without a loader": by_hand("a, b = torch.log(x[i]), y[i]"),
    "by a loader of indices": (
        "from torch.utils.data import DataLoader\nloader = DataLoader(torch.arange(512), batch_size=16)", FIT,
        LOADER_LOOP.replace("for a, b in", "for i in").replace("PREPARED", "a, b = x[i], y[i]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", [5, LATE])
@pytest.mark.parametrize("name", CAME_IN)
def test_data_that_came_in_broken_stays_to_blame(watch: Nursery, name: str, row: int) -> None:
    run = watch(DATA, f"x[{row}, 2] = torch.nan", *CAME_IN[name])
    assert run.first.cause == "data.nonfinite-input"
    assert run.first.step == row // 16
    assert run.first.confidence > 0.9


def test_where_nobody_saw_the_data_both_are_reported(watch: Nursery) -> None:
    prepared = "a, b = torch.log(torch.from_numpy(rows[i.numpy()])), y[i]"
    run = watch(DATA, f"x[{LATE}, 2] = torch.nan\nrows = x.numpy()", *by_hand(prepared))
    assert run.first.cause == "data.nonfinite-input"
    assert run.first.confidence < 0.7
    assert run.at("|torch.log") in run.first.summary


@pytest.mark.parametrize("row", [0, 40])
def test_a_mask_that_is_infinite_on_purpose_is_not_to_blame(watch: Nursery, row: int) -> None:
    run = watch(
        VALUES,
        f"""
        x = torch.randn(64, 8, 8)
        y = x[..., :1] * 2
        x[{row}, 3, 2] = torch.nan
        query, key, out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        optimizer = torch.optim.Adam([*query.parameters(), *key.parameters(), *out.parameters()], lr=1e-2)
        for step in range(64):
            a, b = x[step : step + 1], y[step : step + 1]
            mask = torch.log(torch.tril(torch.ones(8, 8)))
            weights = (query(a) @ key(a).transpose(1, 2) + mask).softmax(-1)
            loss = F.mse_loss(out(weights @ a), b)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        """,
    )
    assert run.first.cause == "data.nonfinite-input"
    assert run.first.step == row


def test_targets_from_a_broken_network_are_no_data(watch: Nursery) -> None:
    run = watch(
        VALUES,
        "import copy",
        FIT,
        """
        other = copy.deepcopy(model)
        for step in range(60):
            a = torch.randn(16, 8)
            with torch.no_grad():
                if step == 33:
                    other[0].weight[3, 3] = torch.nan
                b = a[:, :1] + 0.9 * other(torch.randn(16, 8))
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        """,
    )
    assert "data.nonfinite-input" not in run.causes
    assert "lr.too-high" not in run.causes
    assert "without gradients" in run.first.summary
