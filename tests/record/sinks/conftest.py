"""What the tests of the sinks share."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.append(str(Path(__file__).parent))  # for `sink_batches` and `hook_server`


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No proxy between a test and its own server; nothing of the machine's W&B settings."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))


@pytest.fixture(scope="session")
def ready_database(tmp_path_factory) -> Callable[[Path], str]:
    """The address of a fresh sqlite database for MLflow: a copy, for making one takes seconds."""
    template = tmp_path_factory.mktemp("mlflow") / "template.db"

    def fresh(folder: Path) -> str:
        if not template.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from mlflow.tracking import MlflowClient

                MlflowClient(f"sqlite:///{template}").search_experiments()
        shutil.copy(template, folder / "mlflow.db")
        return f"sqlite:///{folder}/mlflow.db"

    return fresh


@pytest.fixture
def server():
    """A webhook's server, with what it was sent."""
    from hook_server import Server

    made = Server()
    yield made
    made.close()
