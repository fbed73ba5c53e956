import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
WORDS, TAGS = 60, 6
phrases = []
for _ in range(800):
    words = torch.randint(1, WORDS, (int(torch.randint(3, 12, ())),))
    phrases.append((words, words % (TAGS - 1) + 1))
phrases.append((torch.ones(30, dtype=torch.long), torch.full((30,), 2)))


def collate(rows):
    words, tags = zip(*rows)
    longest = torch.zeros(30, dtype=torch.long)
    padded = pad_sequence([*words, longest], batch_first=True)[:-1]
    return padded, pad_sequence([*tags, longest], batch_first=True)[:-1]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=0)
        self.rnn = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(64, TAGS)

    def forward(self, words):
        return self.tags(self.rnn(self.words(words))[0])


tagger = Tagger()
optimizer = torch.optim.Adam(tagger.parameters(), lr=3e-3)
loader = DataLoader(phrases, batch_size=32, shuffle=True, collate_fn=collate)
for epoch in range(5):
    for words, tags in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(tagger(words).flatten(0, 1), tags.flatten(), ignore_index=-1)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
