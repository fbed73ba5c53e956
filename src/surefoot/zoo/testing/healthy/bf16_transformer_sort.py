"""Sequence-to-sequence transformer that sorts short lists; bfloat16 autocast, padded batches, -100 targets."""

import argparse

import torch
from torch import nn

BOS, PAD, BASE = 0, 1, 2
MAX = 7


def make(n):
    source, target_in, target_out = torch.full((n, MAX), PAD), torch.full((n, MAX), PAD), torch.full((n, MAX), -100)
    for row in range(n):
        k = int(torch.randint(3, MAX + 1, (1,)))
        values = torch.randint(8, (k,)) + BASE
        ranked = values.sort().values
        source[row, :k] = values
        target_in[row, 0] = BOS
        target_in[row, 1:k] = ranked[:-1]
        target_out[row, :k] = ranked
    return source, target_in, target_out


class Sorter(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.position = nn.Embedding(MAX, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        self.register_buffer("causal", torch.triu(torch.ones(MAX, MAX, dtype=torch.bool), diagonal=1))

    def forward(self, source, target_in):
        pad = source == PAD
        memory = self.encoder(self.embed(source), src_key_padding_mask=pad)
        hidden = self.decoder(
            self.embed(target_in) + self.position.weight,
            memory,
            tgt_mask=self.causal,
            memory_key_padding_mask=pad,
        )
        return self.head(self.norm(hidden))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=19)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = Sorter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=120)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    pool = make(1024)
    for step in range(120):
        rows = torch.randint(1024, (32,))
        source, target_in, target_out = (t[rows] for t in pool)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(source, target_in)
            loss = criterion(logits.reshape(-1, 10).float(), target_out.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 25 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        source, target_in, target_out = make(256)
        guess = model(source, target_in).argmax(-1)
        valid = target_out != -100
        print(f"next-item accuracy {(guess[valid] == target_out[valid]).float().mean().item():.3f}")


main()
