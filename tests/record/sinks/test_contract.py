"""What every exported sink promises, found in `surefoot.__all__`: exporting one is testing it."""

from __future__ import annotations

import io
import logging
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from sink_batches import healthy, strange

import patience
import surefoot as sf
from surefoot.errors import SettingError, UsageError
from surefoot.record.messages import Batch, Sink
from surefoot.record.sinks.runner import SinkRunner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # SQLAlchemy and MLflow warn of each other

NAMES = [name for name in sf.__all__ if name.endswith("Sink") and name != "Sink"]


class Quiet(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = HTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=NAMES)
def sink(request, tmp_path, address, ready_database):
    makers = {
        "TensorBoardSink": lambda: sf.TensorBoardSink(tmp_path),
        "WandbSink": lambda: sf.WandbSink(mode="offline", dir=str(tmp_path)),
        "MLflowSink": lambda: sf.MLflowSink(ready_database(tmp_path)),
        "WebhookSink": lambda: sf.WebhookSink(address, every_seconds=0),
        "ProgressSink": lambda: sf.ProgressSink(stream=io.StringIO()),
    }
    assert request.param in makers, f"add a line that makes a {request.param} to this table, so that it is tested"
    made = makers[request.param]()
    yield made
    made.close()


def test_the_sinks_are_found():
    assert {"TensorBoardSink", "WandbSink", "MLflowSink", "ProgressSink", "WebhookSink"} <= set(NAMES)


def test_it_takes_in_whatever_a_run_writes_and_is_closed_twice(sink):
    assert isinstance(sink, Sink)
    for batch in [healthy(), *strange(), healthy(5)]:
        sink.write(batch)
    sink.close()
    sink.write(healthy(10))
    sink.write(Batch())
    sink.close()


def test_it_can_be_closed_before_it_was_used(sink):
    sink.close()


def test_it_runs_in_a_thread_without_a_warning_and_without_touching_random_streams(sink, caplog):
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    caplog.set_level(logging.WARNING, logger="surefoot")
    runner = SinkRunner(sink)
    for batch in (healthy(), healthy(5)):
        runner.offer(batch)
    assert runner.flush(patience.HANG_SECONDS)
    runner.close(patience.HANG_SECONDS)
    assert (runner.dropped, runner.given_up, caplog.messages) == (0, False, [])
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert not logging.getLogger("surefoot").disabled


@pytest.mark.parametrize(
    ("make", "extra"),
    [("TensorBoardSink('x')", "tensorboard"), ("WandbSink(mode='offline')", "wandb"), ("MLflowSink()", "mlflow")],
)
def test_a_missing_package_is_said_at_construction_with_what_to_install(make, extra):
    # A module that is `None` in `sys.modules` cannot be imported, as if it were not installed.
    code = f"""
import sys
sys.modules[{extra!r}] = None
import surefoot
try:
    surefoot.{make}
except surefoot.UsageError as error:
    assert "pip install -e '.[{extra}]'" in str(error), error
else:
    raise SystemExit('no error')
"""
    patience.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sf.TensorBoardSink("x", every_steps=0),
        lambda: sf.WandbSink(mode="offline", alerts=("fatal",)),
        lambda: sf.WandbSink("p", run=object()),
        lambda: sf.MLflowSink(""),
        lambda: sf.MLflowSink(layers_every_steps=-1),
        lambda: sf.WebhookSink("https://host/", severities=()),
        lambda: sf.WebhookSink("https://host/", attempts=0),
        lambda: SinkRunner(object()),
        lambda: sf.WebhookSink("ftp://host/"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(make):
    with pytest.raises((SettingError, UsageError)):
        make()
