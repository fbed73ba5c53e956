"""A webhook's server on this machine, and alerts to send to it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sink_batches import event, step

from patience import HANG_SECONDS
from surefoot.record.messages import Batch

SECRET = "T000-B000-verysecret"


class Server:
    """Keeps every message. `answers` are the next statuses with their headers; after them it is always 200."""

    def __init__(self):
        self.messages, self.paths, self.answers, self.delay = [], [], [], threading.Event()
        self.delay.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.delay.wait(HANG_SECONDS)
                status, headers = outer.answers.pop(0) if outer.answers else (200, {})
                outer.paths.append(self.path)
                if status == 200:
                    outer.messages.append((json.loads(body), dict(self.headers)))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": "0"}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(OSError):  # the client no longer waits for the answer
                    super().handle()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/services/{SECRET}"

    @property
    def bodies(self):
        return [body for body, _ in self.messages]

    def close(self):
        self.delay.set()
        self.http.shutdown()
        self.http.server_close()


def alarm(number=7, summary="the gradient is NaN", **fields):
    return event("skip", number, summary, **{"severity": "error", "cause": "nonfinite", "action": "skipped", **fields})


def of(*events):
    return Batch(steps=[step(1)], events=events)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
