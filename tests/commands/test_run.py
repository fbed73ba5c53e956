"""`surefoot run` from beginning to end: the sinks that its options ask for, and a script without torch."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

import forked
import patience
import surefoot as sf

SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    x = torch.full((8, 4), float("nan") if step == 20 else 1.0)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_a_launcher_under_surefoot_is_told_how_its_ranks_are_observed(tmp_path):
    ended = forked.run(["-m", "surefoot", "run", "--out", "o", "-m", "torch.distributed.run", "--help"], cwd=tmp_path)
    assert ended.returncode == 0
    assert "run: torchrun ... -m surefoot run SCRIPT ..." in ended.stderr


def test_alerts_and_curves_of_a_watched_script_reach_the_webhook_and_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    bodies = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "train.py").write_text(SCRIPT)
    address = f"http://127.0.0.1:{server.server_port}/hook"
    options = ["--out", "run", "--tensorboard", "curves", "--webhook-env", "HOOK", "--heartbeat", "3600"]
    environment = forked.environment(HOOK=address, no_proxy="*")
    ran = forked.run(["-m", "surefoot", "run", *options, "train.py"], cwd=tmp_path, env=environment)
    server.shutdown()
    server.server_close()
    assert ran.returncode == 0, ran.stderr
    curves = event_accumulator.EventAccumulator(str(tmp_path / "curves"))
    curves.Reload()
    logged = sf.load_run(tmp_path / "run").scalars
    assert [point.step for point in curves.Scalars("loss")] == logged["step"].to_pylist()
    assert np.float32(logged["loss"].to_pylist()[0]) == np.float32(curves.Scalars("loss")[0].value)
    assert any(tag.startswith("histogram_gradient/") for tag in curves.Tags()["histograms"])
    assert [body["event"] for body in bodies].count("heartbeat") == 1
    alerts = [body for body in bodies if body["event"] != "heartbeat"]
    assert alerts[0]["run"] == "train"
    assert alerts[0]["severity"] == "error"
    captured = next(body for body in bodies if "incident" in body)
    assert Path(captured["incident"]).is_dir()
    assert captured["replay"] == f"surefoot replay {captured['incident']} --script train.py"
    findings = json.loads((tmp_path / "run" / "findings.json").read_text())
    ended = bodies[-1]
    assert ended["severity"] == "error"
    assert (ended["event"], ended["verdict"]) == ("end", findings["verdict"])
    assert ended["cause"] == findings["findings"][0]["cause"]
    assert ended["command"] == f"surefoot report {tmp_path / 'run'}"
    assert ended["steps"] > 0
    assert address not in (tmp_path / "run" / "run.json").read_text()


def test_a_script_without_torch_gets_one_line(tmp_path):
    (tmp_path / "plain.py").write_text("import sys; print('done', file=sys.stderr); sys.exit(3)")
    command = [sys.executable, "-m", "surefoot", "run", "plain.py"]
    ended = patience.run(command, cwd=tmp_path, env=forked.environment())
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == (
        "done\n\nsurefoot: the script did not import torch in this process, so there was nothing to observe\n"
    )
