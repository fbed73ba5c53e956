"""The live server over real sockets: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

import patience
import report_runs
import surefoot
from surefoot.record.messages import StepRow
from surefoot.report.page.serve import LiveServer, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = report_runs.quiet(tmp_path_factory.mktemp("runs") / "run")
    (folder.parent / "secret.txt").write_text("secret")
    with LiveServer(folder, port=0) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patience.HANG_SECONDS)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.port}", **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode("utf-8")
    connection.close()
    return answer, body


def test_the_page_and_its_data_are_served_and_closed_to_others(server):
    answer, body = ask(server)
    assert answer.status == 200
    assert 'id="data"' in body
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    answer, body = ask(server, "/data?since=")
    assert answer.status == 200
    assert json.loads(body)["sections"]["head"]["verdict"] == "healthy"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert "Python" not in answer.headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "//etc/passwd",
        "/etc/passwd",
        "/run.json",
        "/telemetry/scalars-000-0-00000.arrows",
        "/data/../run.json",
        "/data/",
        "/./",
        "/\\..\\secret.txt",
        "http://127.0.0.1/data",
        "*",
        "/favicon.ico",
    ],
)
def test_no_other_path_is_answered(server, path):
    answer, body = ask(server, path)
    assert answer.status == 404
    assert "secret" not in body.replace("secret.txt", "")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example:{port}",
        "localhost.evil.example:{port}",
        "127.0.0.1:1",
        "localhost",
        "user@127.0.0.1:{port}",
        "127.0.0.1:{port}@evil.example",
        "10.0.0.1:{port}",
        "",
        "[::1",
        "127.0.0.1:99999999",
    ],
)
@pytest.mark.parametrize("path", ["/", "/data"])
def test_another_host_is_refused(server, host, path):
    assert ask(server, path, Host=host.format(port=server.port))[0].status == 403


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_its_own_names_are_answered(server, host):
    assert ask(server, "/data", Host=host.format(port=server.port))[0].status == 200


def test_two_hosts_or_none_are_refused(server):
    for lines in (b"", b"Host: 127.0.0.1:%d\r\nHost: evil.example\r\n" % server.port):
        with socket.create_connection(("127.0.0.1", server.port), timeout=patience.HANG_SECONDS) as wire:
            wire.sendall(b"GET /data HTTP/1.1\r\n" + lines + b"\r\n")
            assert b" 403 " in wire.makefile("rb").readline()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/data"])
def test_another_origin_is_refused(server, headers, path):
    sent = {name: value.format(port=server.port) for name, value in headers.items()}
    assert ask(server, path, **sent)[0].status == 403


def test_its_own_page_and_a_followed_link_are_answered(server):
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Sec_Fetch_Site": "same-origin"}
    assert ask(server, "/data", **own)[0].status == 200
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert ask(server, "/", **link)[0].status == 200
    assert ask(server, "/data", **link)[0].status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "PURGE"])
def test_only_get_is_answered(server, method):
    answer, _ = ask(server, "/data", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET"


def test_a_page_is_sent_only_what_changed_since_it_last_asked(tmp_path):
    from surefoot.report.page.serve import LiveRun

    run = LiveRun(tmp_path)
    waiting = json.loads(run.news(""))
    assert waiting["sections"]["head"]["state"] == "waiting"
    with surefoot.RunLog(tmp_path) as log:
        log.take(StepRow(step=0, time=0.0, loss=2.0))
        log.take(StepRow(step=1, time=1.0, loss=1.5))
        log.flush(patience.HANG_SECONDS)
        first = _after_a_while(run, waiting["cursor"])
        assert set(first["sections"]) >= {"head", "charts"}
        assert "maps" not in first["sections"]
        assert json.loads(run.news(first["cursor"]))["sections"] == {}
        log.take(StepRow(step=2, time=2.0, loss=1.0))
        log.flush(patience.HANG_SECONDS)
        second = _after_a_while(run, first["cursor"])
        assert second["sections"]["charts"][0]["series"][0]["x"] == [0, 1, 2]
        assert "findings" not in second["sections"]
    other_server = json.loads(LiveRun(tmp_path).news(second["cursor"]))
    assert "facts" in other_server["sections"]


def _after_a_while(run, cursor):
    found = {}

    def arrived():
        found.update(json.loads(run.news(cursor)))
        return found["sections"].get("charts")

    patience.wait_until(arrived, lambda: "the rows never arrived")
    return found


def test_a_port_in_use_is_one_line_and_exit_code_two(server, tmp_path):
    done = _surefoot("serve", str(tmp_path), "--port", str(server.port))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--port" in done.stderr


def test_it_says_where_it_is_waits_for_a_run_and_ends_quietly(tmp_path):
    command = [sys.executable, "-m", "surefoot", "serve", str(tmp_path / "yet"), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stderr.readline()
        port = int(address.split("127.0.0.1:")[1].split("/")[0])
        assert "warning" in process.stderr.readline()  # anybody in the network may read it
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.HANG_SECONDS)
        connection.request("GET", "/data")
        assert json.load(connection.getresponse())["sections"]["head"]["headline"] == "no run recorded yet"
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=patience.HANG_SECONDS)[1].strip() == ""
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_report_prints_the_path_of_the_page(tmp_path):
    folder = report_runs.quiet(tmp_path / "run")
    done = _surefoot("report", str(folder), "-o", str(tmp_path / "deep" / "page.html"))
    assert done.returncode == 0
    assert done.stdout.strip() == str(tmp_path / "deep" / "page.html")
    assert (tmp_path / "deep" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    wrong = _surefoot("report", str(tmp_path / "none"))
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def _surefoot(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "surefoot", *arguments]
    return patience.run(command, env=environment)


def test_that_a_run_has_not_begun_is_told_at_the_start(tmp_path):
    said = []

    def show(words):
        said.append(words)
        raise KeyboardInterrupt

    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(KeyboardInterrupt):
            serve(folder, port=0, show=show)
    assert said[0].endswith("(Ctrl-C to stop); there is no run yet, and the page waits for it")
    assert said[1].endswith("(Ctrl-C to stop)")
