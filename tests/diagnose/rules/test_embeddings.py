"""Embeddings that become the same for all rows, on real scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from watched import Nursery

VIEWS = """
import torch
from torch import nn

torch.manual_seed(0)
rows = torch.randn(600, 8) @ torch.randn(8, 24)

class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, view, other):
        code, other_code = self.encoder(view), self.encoder(other)
        return self.predictor(code), self.predictor(other_code), code, other_code

model, similarity = Views(), nn.CosineSimilarity(dim=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(120):
    picked = rows[torch.randint(600, (64,))]
    first, second, code, other = model(picked + torch.randn_like(picked), picked + torch.randn_like(picked))
    loss = -similarity(first, otherCUT).mean() - similarity(second, codeCUT).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_embeddings_that_are_only_compared_with_each_other_collapse(watch: Nursery) -> None:
    found = watch(VIEWS.replace("CUT", "")).finding("model.collapsed-embedding")
    assert found.severity == "error"
    assert found.evidence["spread_last"] < 0.3 * found.evidence["spread_first"]
    assert "z2.detach()" in found.fixes[0]


def test_embeddings_that_are_compared_with_fixed_ones_do_not(watch: Nursery) -> None:
    assert watch(VIEWS.replace("CUT", ".detach()")).causes == []


TRIPLETS = """
import torch
from torch import nn

torch.manual_seed(0)
kinds = torch.randint(4, (400,))
rows = torch.randn(4, 10)[kinds] * 2 + torch.randn(400, 10)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
embed = lambda given: nn.functional.normalize(model(given), dim=1)
triplet = nn.TripletMarginLoss(margin=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(80):
    anchors = torch.randint(400, (48,))
    same = torch.stack([(kinds == kinds[i]).float().multinomial(1)[0] for i in anchors])
    others = torch.stack([(kinds != kinds[i]).float().multinomial(1)[0] for i in anchors])
    optimizer.zero_grad()
    triplet(embed(rows[anchors]), embed(rows[ORDER[0]]), embed(rows[ORDER[1]])).backward()
    optimizer.step()
"""


def test_triplets_in_the_wrong_order_are_named(watch: Nursery) -> None:
    found = watch(TRIPLETS.replace("ORDER", "(others, same)")).finding("model.collapsed-embedding")
    assert "anchor, positive and negative" in found.fixes[0]
    assert watch(TRIPLETS.replace("ORDER", "(same, others)")).causes == []


TEACHER = """
import torch
from torch import nn

torch.manual_seed(0)
rows = torch.randn(600, 12)
with torch.no_grad():
    taught = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))(rows) + 2 * torch.randn(16)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(120):
    picked = torch.randint(600, (64,))
    loss = (1 - nn.functional.cosine_similarity(model(rows[picked]), taught[picked], dim=1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_embeddings_that_follow_those_of_a_teacher_may_be_alike(watch: Nursery) -> None:
    assert watch(TEACHER).causes == []


VALUES = """
import copy
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
earlier = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(300):
    rows, following, action = torch.randn(64, 4), torch.randn(64, 4), torch.randint(2, (64, 1))
    with torch.no_grad():
        target = 1 + 0.95 * earlier(following).max(1).values
    loss = nn.functional.mse_loss(target, model(rows).gather(1, action).squeeze(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        earlier.load_state_dict(model.state_dict())
"""


def test_values_of_actions_may_be_alike_on_either_side_of_the_loss(watch: Nursery) -> None:
    """The prediction of many Q-learning scripts is the second argument of the loss."""
    assert watch(VALUES).causes == []
