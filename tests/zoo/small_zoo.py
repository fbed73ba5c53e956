"""A zoo of a few scripts."""

from surefoot.zoo import Specimen

SCRIPT = """
import sys, torch
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def a_zoo(root, **scripts):
    found = []
    for name, text in scripts.items():
        half, truth, stem = name.split("__")
        path = root / half / truth.replace("_", ".") / f"{stem}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        found.append(Specimen(half, path.parent.name, path))
    return found
