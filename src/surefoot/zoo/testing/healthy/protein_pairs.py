"""Long sequences, memory for two of them: a small transformer classifier with micro-batches of two."""

import argparse

import torch
from torch import nn

VOCAB, PAD, LENGTH = 21, 0, 40


def make_sequences(n, generator):
    """Class 1 carries the motif 5-9-5 somewhere, class 0 the same letters in another order."""
    seqs = torch.randint(1, VOCAB, (n, LENGTH), generator=generator)
    labels = torch.randint(2, (n,), generator=generator)
    for i in range(n):
        at = int(torch.randint(LENGTH // 2 - 3, (1,), generator=generator))
        seqs[i, at : at + 3] = torch.tensor([5, 9, 5] if labels[i] else [5, 5, 9])
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, (1,), generator=generator))
        seqs[i, length:] = PAD
    return seqs, labels


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids):
        pad = ids == PAD
        x = self.embed(ids)
        x = x + torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.norm(self.encoder(x, src_key_padding_mask=pad))
        return self.head(x.masked_fill(pad.unsqueeze(-1), -1e4).amax(1))


parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)
g = torch.Generator().manual_seed(args.seed + 1)
train_x, train_y = make_sequences(460, g)
test_x, test_y = make_sequences(300, g)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

average = 0.7
for epoch in range(2):
    for step, idx in enumerate(torch.randperm(len(train_x), generator=g).split(2)):
        loss = criterion(model(train_x[idx]), train_y[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = 0.97 * average + 0.03 * loss.item()
        if step % 46 == 45:
            print(f"epoch {epoch} step {step + 1} loss {average:.4f}")
model.eval()
with torch.no_grad():
    print(f"test accuracy {(model(test_x).argmax(1) == test_y).float().mean().item():.3f}")
