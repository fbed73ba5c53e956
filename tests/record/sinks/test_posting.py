"""Addresses that cannot work, redirects, and what `Retry-After` says."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from hook_server import SECRET, Server, alarm, of

import surefoot as sf
from patience import wait_until
from surefoot.record.sinks import posting


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0), ("17", 17), ("soon", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("-5", 0), ("²", 0)],
)
def test_retry_after_is_read_as_far_as_it_can_be(header, seconds):
    assert posting.wait_seconds(header) == seconds


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_on_the_same_host_is_followed_with_the_message(server, status):
    server.answers = [(status, {"Location": "/moved"})]
    hook = sf.WebhookSink(server.url)
    hook.write(of(alarm()))
    hook.close()
    assert server.paths == [f"/services/{SECRET}", "/moved"]
    assert len(server.bodies) == 1


@pytest.mark.parametrize("scheme", ["http://{}/", "//{}/", "file:///etc/passwd?{}", "http://user@{}/", "https://{}/"])
def test_a_redirect_to_elsewhere_is_not_followed(server, scheme, caplog):
    other = Server()
    server.answers = [(307, {"Location": scheme.format(f"127.0.0.1:{other.http.server_port}")})]
    hook = sf.WebhookSink(server.url)
    hook.write(of(alarm()))
    hook.close()
    other.close()
    assert (other.paths, server.bodies, hook.undelivered) == ([], [], 1)
    assert "redirect that is not followed" in caplog.messages[0]


def test_a_redirect_in_a_circle_ends(server):
    server.answers = [(308, {"Location": "/again"})] * 50
    hook = sf.WebhookSink(server.url)
    hook.write(of(alarm()))
    assert len(server.paths) == posting.MOST_REDIRECTS + 1
    hook.close()


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://host/{SECRET}",
        f"file:///{SECRET}",
        SECRET,
        "",
        f"https:///{SECRET}",
        f"https://user:{SECRET}@host/",
        f"https://host/{SECRET} x",
        f"https://host/{SECRET}\r\nX: y",
        f"https://host:port/{SECRET}",
        f"https://[/{SECRET}",
        None,
    ],
)
def test_an_address_that_cannot_work_is_refused_without_being_shown(url):
    with pytest.raises(sf.UsageError) as caught:
        sf.WebhookSink(url)
    assert SECRET not in str(caught.value)


class DrippingServer:
    """Sends the headers of its answer byte by byte, for as long as anybody reads them."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.bytes_sent, self.left = 0, threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/{SECRET}"

    def _serve(self):
        connected, _ = self.socket.accept()
        with connected, contextlib.suppress(OSError):
            connected.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self.left.wait(0.01):
                connected.sendall(b"x")
                self.bytes_sent += 1
        self.left.set()


def test_a_server_that_drips_its_answer_does_not_extend_the_time_limit(caplog):
    server = DrippingServer()
    hook = sf.WebhookSink(server.url, timeout_seconds=0.3, attempts=1)
    hook.write(of(alarm()))  # returns although the server never stops
    assert "no answer within 0.3 s" in caplog.messages[0]
    assert server.bytes_sent > 0
    wait_until(server.left.is_set, lambda: f"{server.bytes_sent} bytes sent")  # the connection was closed
    assert hook.undelivered == 1
    hook.close()
    server.socket.close()


def test_the_time_limit_is_for_all_redirects_together(server):
    server.answers = [(308, {"Location": "/again"})] * 3
    address = posting.Address(server.url, {}, 60.0)
    assert address.post(b"{}") is None
    timeouts = []
    opened = address._opener.open
    address._opener.open = lambda request, timeout: timeouts.append(timeout) or opened(request, timeout=timeout)
    server.answers = [(308, {"Location": "/again"})] * 3
    assert address.post(b"{}") is None
    assert len(timeouts) == 4
    assert timeouts == sorted(timeouts, reverse=True)
    assert timeouts[0] > timeouts[-1]
