"""Tells functions from classes by the spelling of their names (a bidirectional LSTM over characters, padded batches)."""

import argparse
import ast
import asyncio
import collections
import ctypes
import datetime
import decimal
import email.message
import http.client
import inspect
import logging
import pathlib
import pickle
import random
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import tokenize
import typing
import unittest.mock
import urllib.request
import zipfile

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
random.seed(seed)
torch.manual_seed(seed)

MODULES = [argparse, ast, asyncio, collections, ctypes, datetime, decimal, email.message, http.client, inspect, logging]
MODULES += [
    pathlib,
    pickle,
    random,
    socket,
    ssl,
    subprocess,
    tarfile,
    threading,
    tokenize,
    typing,
    unittest,
    unittest.mock,
]
names = {}
for module in [*MODULES, urllib.request, zipfile]:
    for name, value in vars(module).items():
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value)):
            names[name] = int(inspect.isclass(value))
pairs = sorted(names.items())
random.shuffle(pairs)
print(f"{len(pairs)} names, {sum(v for _, v in pairs) / len(pairs):.2f} of them classes")
chars = sorted({c for name, _ in pairs for c in name})
encode = lambda name: torch.tensor([chars.index(c) + 1 for c in name])
cut = int(0.8 * len(pairs))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(chars) + 1, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 2)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.out(torch.cat([h[0], h[1]], dim=1))


def collate(rows):
    ids = [encode(name) for name, _ in rows]
    return pad_sequence(ids, batch_first=True), torch.tensor([len(i) for i in ids]), torch.tensor([v for _, v in rows])


model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(6):
    train = pairs[:cut]
    random.shuffle(train)
    total, batches = 0.0, 0
    for i in range(0, cut, 32):
        ids, lengths, y = collate(train[i : i + 32])
        loss = nn.functional.cross_entropy(model(ids, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total, batches = total + loss.item(), batches + 1
    with torch.no_grad():
        ids, lengths, y = collate(pairs[cut:])
        hits = (model(ids, lengths).argmax(1) == y).float().mean().item()
    print(f"epoch {epoch} loss {total / batches:.4f} held-out accuracy {hits:.3f}")
