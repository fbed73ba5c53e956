"""One thread and one seed for every test here, and a way to load the repository's scripts."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small: threads would only fight over the cores
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def script():
    """Load a script of the repository as a module, by its path, with its folder importable as when it is run."""

    def load(path):
        folder = str((ROOT / path).parent)
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(Path(path).stem)
        finally:
            sys.path.remove(folder)

    return load
