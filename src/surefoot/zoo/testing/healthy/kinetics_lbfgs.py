"""Fits the rate constants of a decay curve in double precision; L-BFGS takes the loss very close to zero."""

import sys

import torch

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
torch.set_default_dtype(torch.float64)

t = torch.linspace(0, 5, 60)
true_amplitudes = 0.5 + torch.rand(2)
true_rates = torch.tensor([0.4, 2.0]) + 0.3 * torch.rand(2)
curve = (true_amplitudes[:, None] * torch.exp(-true_rates[:, None] * t)).sum(0)

log_amplitude = torch.zeros(2, requires_grad=True)
log_rate = torch.tensor([-0.5, 0.8], requires_grad=True)
optimizer = torch.optim.LBFGS(
    [log_amplitude, log_rate], max_iter=5, tolerance_grad=1e-13, tolerance_change=1e-15, line_search_fn="strong_wolfe"
)


def closure():
    optimizer.zero_grad()
    fit = (log_amplitude.exp()[:, None] * torch.exp(-log_rate.exp()[:, None] * t)).sum(0)
    loss = (fit - curve).pow(2).mean()
    loss.backward()
    return loss


for it in range(9):
    loss = optimizer.step(closure)
    if it % 2 == 0:
        print(f"round {it:2d}  loss {loss.item():.3e}  rates {log_rate.exp().tolist()}")
print("true rates", true_rates.tolist(), "final loss", f"{closure().item():.2e}")
