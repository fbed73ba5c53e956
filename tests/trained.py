"""A short training whose state is kept and written back."""

import copy

import torch
from torch import nn

from surefoot.keep.snapshots import TrainedState

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1),
}


class Run:
    def __init__(self, optimizer="adamw"):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.rules = [0]
        self.state = TrainedState([self.model], self.optimizer, lambda: list(self.rules), self.set_rules)
        self.data = torch.randn(50, 16, 4)
        self.steps = 0

    def set_rules(self, rules):
        self.rules = list(rules)

    def train(self, steps):
        for _ in range(steps):
            x = self.data[self.steps % 50]

            def closure(x=x):
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                return loss

            self.optimizer.step(closure)
            self.steps += 1
            self.rules[0] += 1

    def bits(self):
        moments = [list(state.values()) for state in self.optimizer.state.values()]
        return copy.deepcopy([list(self.model.state_dict().values()), moments, self.rules])
