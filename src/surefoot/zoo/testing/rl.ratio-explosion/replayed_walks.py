"""Off-policy policy gradient from logged walks on a ring of cells."""

import argparse

import torch
import torch.nn.functional as F

CELLS, STEPS = 8, 20


def log_walks(n, gen):
    """Walks of the old controller, which moves right with probability 0.25."""
    start = torch.randint(CELLS, (n,), generator=gen)
    action = (torch.rand(n, STEPS, generator=gen) < 0.25).long()
    cells = (start[:, None] + (2 * action - 1).cumsum(1)) % CELLS
    visited = torch.cat([start[:, None], cells[:, :-1]], 1)
    reward = action.float() - 0.5 * (cells == 0).float()
    behaviour = torch.where(action == 1, 0.25, 0.75).log()
    return visited, action, reward, behaviour


def main():
    p = argparse.ArgumentParser()
    p.add_argument("seed", nargs="?", type=int, default=91)
    p.add_argument("--lr", type=float, default=0.5)
    args = p.parse_args()
    gen = torch.Generator().manual_seed(args.seed)
    table = torch.zeros(CELLS, 2, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=args.lr)
    for step in range(1, 201):
        visited, action, reward, behaviour = log_walks(32, gen)
        log_prob = F.log_softmax(table[visited], -1).gather(2, action[..., None])[..., 0]
        ratio = (log_prob - behaviour).cumsum(1).exp()
        to_go = reward.flip(1).cumsum(1).flip(1)
        advantage = to_go - to_go.mean(0)
        loss = -(ratio * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            right = table.softmax(-1)[:, 1].mean().item()
            norm = table.grad.norm().item()
            print(
                f"step {step} loss {loss.item():.3f} max ratio {ratio.max().item():.2f} grad {norm:.3f} right {right:.3f}"
            )


if __name__ == "__main__":
    main()
