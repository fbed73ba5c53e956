"""Addresses that cannot work, redirects, and what `Retry-After` says."""

from __future__ import annotations

import pytest
from hook_server import SECRET, Server, alarm, of

import surefoot as sf
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
