import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

LENGTH, KINDS, HIDDEN = 16, 4, 20
signals = 0.5 * torch.randn(1200, LENGTH, 6)
kinds = torch.randint(0, KINDS, (1200,))
for signal, kind in zip(signals, kinds):
    start = int(torch.randint(0, LENGTH - 5, (1,)))
    signal[start : start + 5, kind] += 2.0


class MotifClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, HIDDEN, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * HIDDEN, KINDS)

    def forward(self, x):
        _, (states, _) = self.rnn(x)
        return self.out(states.view(x.size(0), 2 * HIDDEN))


net = MotifClassifier()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
loader = DataLoader(TensorDataset(signals, kinds), batch_size=30, shuffle=True)
for epoch in range(6):
    for x, kind in loader:
        loss = nn.functional.cross_entropy(net(x), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
