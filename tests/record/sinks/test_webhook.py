"""Alerts against a real server on this machine that is also slow, down, failing and asking to wait."""

from __future__ import annotations

import base64
import contextlib
from pathlib import Path

import pytest
from hook_server import SECRET, alarm, free_port, of
from sink_batches import event, step

import surefoot as sf
from patience import HANG_SECONDS, Clock, wait_until
from surefoot.errors import SettingError
from surefoot.record.messages import Batch
from surefoot.record.progress_alarms import LOADER_STALLED, NO_CHECKPOINT, SLOW, STALLED
from surefoot.record.sinks import webhook
from surefoot.record.sinks.runner import SinkRunner


@pytest.fixture
def clock(monkeypatch):
    """The webhook's own time."""
    found = Clock()
    monkeypatch.setattr(webhook, "time", found)
    return found


def test_an_alert_contains_what_happened_where_and_what_was_done(server):
    hook = sf.WebhookSink(server.url, run="exp1", headers={"X-Token": "abc"})
    hook.write(of(alarm(evidence={"incident": "runs/exp1/incidents/7"})))
    hook.close()
    ((body, headers),) = server.messages
    assert body["text"] == (
        "*surefoot: exp1*\n[error] skip at step 7: the gradient is NaN "
        "(cause: nonfinite; action: skipped; incident: runs/exp1/incidents/7)"
    )
    expected = {"run": "exp1", "severity": "error", "step": 7, "cause": "nonfinite", "action": "skipped"}
    assert expected.items() <= body.items()
    assert body["summary"] == "the gradient is NaN"
    assert body["incident"] == body["alerts"][0]["incident"] == "runs/exp1/incidents/7"
    assert headers["Content-Type"].startswith("application/json")
    assert headers["X-Token"] == "abc"


def test_an_alert_has_the_command_that_runs_the_step_again(server):
    hook = sf.WebhookSink(server.url, run="exp1")
    evidence = {
        "incident": "runs/exp1/incidents/7",
        "replay": "surefoot replay runs/exp1/incidents/7 --script train.py",
    }
    hook.write(of(alarm(evidence=evidence)))
    hook.close()
    (body,) = server.bodies
    assert body["replay"] == body["alerts"][0]["replay"] == evidence["replay"]
    assert body["text"].endswith(f"; incident: runs/exp1/incidents/7; replay: {evidence['replay']})")


def test_without_an_incident_the_checkpoint_is_named(server):
    hook = sf.WebhookSink(server.url)
    hook.write(of(alarm(evidence={"checkpoint": "runs/exp1/checkpoints/900"})))
    hook.close()
    assert server.bodies[0]["incident"] == "runs/exp1/checkpoints/900"


def test_only_the_chosen_severities_are_sent(server):
    hook = sf.WebhookSink(server.url, severities=("warning",))
    hook.write(of(alarm(), event(severity="info"), alarm(8, severity="warning")))
    hook.close()
    assert [body["step"] for body in server.bodies] == [8]


def test_text_from_users_is_escaped_for_slack_and_as_it_was_in_the_fields(server):
    text = "<!channel> & <https://evil.example|click>"
    hook = sf.WebhookSink(server.url, run=text)
    hook.write(of(alarm(summary=text, cause=text, action=text, part=text, evidence={"incident": text})))
    hook.close()
    (body,) = server.bodies
    assert "<" not in body["text"]
    assert body["text"].count("&lt;!channel&gt; &amp; &lt;https://evil.example|click&gt;") == 6
    assert body["summary"] == text


def test_further_alerts_are_held_back_counted_and_sent_together_when_the_time_has_passed(server, clock):
    hook = sf.WebhookSink(server.url, every_seconds=60)
    hook.write(of(alarm(1)))
    for number in range(2, 15):
        hook.write(of(alarm(number)))
    assert [body["step"] for body in server.bodies] == [1]
    clock.now += 59
    hook.tick()
    assert len(server.bodies) == 1
    clock.now += 1
    hook.tick()
    second = server.bodies[1]
    assert [alert["step"] for alert in second["alerts"]] == list(range(2, 15))
    assert second["held_back"] == 13
    assert "13 held back" in second["text"]
    assert "… and 3 more." in second["text"]
    hook.close()
    assert len(server.bodies) == 2


def test_what_is_held_back_at_the_end_is_sent_at_the_end(server):
    hook = sf.WebhookSink(server.url, every_seconds=3600)
    for number in range(300):
        hook.write(of(alarm(number)))
    hook.close()
    hook.close()
    hook.write(of(alarm()))
    first, last = server.bodies
    assert first["held_back"] == 0
    assert last["held_back"] == 299
    assert len(last["alerts"]) == webhook.MOST_HELD


def test_a_quiet_run_sends_held_back_alerts_by_itself(server, monkeypatch):
    monkeypatch.setattr("surefoot.record.sinks.runner.TICK_SECONDS", 0.02)
    runner = SinkRunner(sf.WebhookSink(server.url, every_seconds=0.2))
    for number in range(3):
        runner.offer(of(alarm(number)))
    wait_until(lambda: server.bodies and server.bodies[-1]["alerts"][-1]["step"] == 2)
    runner.close()


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_server_that_fails_for_a_while_gets_the_alert_in_the_end(server, status, caplog, clock):
    server.answers = [(status, {})] * 2
    hook = sf.WebhookSink(server.url, pause_seconds=10)
    hook.write(of(alarm()))
    for pause in (10, 20):
        hook.tick()
        clock.now += pause - 1
        hook.tick()
        assert not server.bodies
        clock.now += 1
    hook.tick()
    hook.close()
    assert [body["step"] for body in server.bodies] == [7]
    assert len(server.paths) == 3
    assert len(caplog.messages) == 1
    assert f"HTTP {status}" in caplog.messages[0]


def test_the_wait_that_a_server_requests_is_kept(server, clock):
    server.answers = [(429, {"Retry-After": "100"})]
    hook = sf.WebhookSink(server.url, pause_seconds=1)
    hook.write(of(alarm()))
    clock.now += 99
    hook.tick()
    assert len(server.paths) == 1
    clock.now += 1
    hook.tick()
    assert (len(server.paths), len(server.bodies)) == (2, 1)


def test_one_that_never_recovers_is_given_up_and_the_next_message_counts_it(server, caplog):
    server.answers = [(500, {})] * 3
    hook = sf.WebhookSink(server.url, every_seconds=0, attempts=3, pause_seconds=0)
    hook.write(of(alarm(1), alarm(2)))
    hook.tick()
    hook.tick()
    assert (server.bodies, hook.undelivered) == ([], 2)
    hook.write(of(alarm(3)))
    hook.close()
    (body,) = server.bodies
    assert (body["undelivered"], [alert["step"] for alert in body["alerts"]]) == (2, [3])
    assert "2 earlier alerts could not be delivered" in body["text"]
    assert len(caplog.messages) == 2


def test_a_refusal_is_not_tried_again(server, caplog):
    server.answers = [(404, {})]
    hook = sf.WebhookSink(server.url)
    hook.write(of(alarm()))
    hook.close()
    assert len(server.paths) == 1
    assert hook.undelivered == 1


def test_a_slow_server_costs_the_timeout_and_no_more(server, caplog):
    server.delay.clear()
    hook = sf.WebhookSink(server.url, timeout_seconds=0.1, attempts=1)
    hook.write(of(alarm()))
    assert server.messages == [], "the server is still slow"
    assert "no answer within 0.1 s" in caplog.messages[0]
    hook.close()


def test_a_server_that_is_down_or_slow_does_not_hold_the_run_up(server, caplog):
    server.delay.clear()
    runners = [SinkRunner(sf.WebhookSink(url)) for url in (server.url, f"http://127.0.0.1:{free_port()}/{SECRET}")]
    for runner in runners:
        for _ in range(100):
            runner.offer(of(alarm()))
        runner.close(0.2)
    assert server.messages == [], "the server is still slow"
    wait_until(lambda: "Connection refused" in caplog.text)
    server.delay.set()
    for runner in runners:
        runner.close(HANG_SECONDS)


def test_the_address_is_in_no_warning_and_in_no_repr(server, caplog):
    server.answers = [(500, {})] * 9
    for url in (server.url, f"http://127.0.0.1:{free_port()}/{SECRET}", f"http://no-such-host.invalid/{SECRET}"):
        hook = sf.WebhookSink(url, attempts=1, timeout_seconds=1)
        hook.write(of(alarm()))
        hook.close()
        assert SECRET not in repr(hook)
    assert len(caplog.messages) == 6
    assert SECRET not in caplog.text


def ended(summary="the log was closed", **fields):
    return event("end", 99, summary, **fields)


def test_the_message_at_the_end_has_the_verdict_the_command_and_a_picture_of_the_loss(server):
    hook = sf.WebhookSink(server.url, run="exp1")
    hook.opened(Path("runs/exp1"))
    hook.write(Batch(steps=[step(number, 5.0 / (number + 1)) for number in range(100)]))
    evidence = {
        "verdict": "broken",
        "cause": "lr.too-high",
        "why": "At a learning rate of 3 the loss rises.",
    }
    finding = event("finding", 12, "At a learning rate of 3 the loss rises.", severity="error", cause="lr.too-high")
    hook.write(Batch(events=[finding, ended("broken; exit code 0", evidence=evidence)]))
    assert server.bodies == []  # the end follows at once, and one message is enough
    hook.close()
    (body,) = server.bodies
    assert {name: body[name] for name in ("event", "verdict", "cause", "command", "step", "steps")} == {
        "event": "end",
        "verdict": "broken",
        "cause": "lr.too-high",
        "command": "surefoot report runs/exp1",
        "step": 99,
        "steps": 100,
    }
    assert (body["first_loss"], body["lowest_loss"], body["loss"]) == (5.0, 0.05, 0.05)
    assert [alert["event"] for alert in body["alerts"]] == ["finding"]
    assert body["picture"]["type"] == "image/png"
    image = base64.b64decode(body["picture"]["base64"])
    assert image.startswith(b"\x89PNG")
    lines = body["text"].split("\n")
    assert lines[1] == "[error] end: broken; exit code 0 (cause: lr.too-high)"
    assert lines[4].startswith("`█")
    assert lines[5] == "Details: `surefoot report runs/exp1`"


@pytest.mark.parametrize(("verdict", "severity"), [("broken", "error"), ("unstable", "warning"), ("healthy", "info")])
def test_the_severity_of_the_end_is_that_of_its_verdict(server, verdict, severity):
    hook = sf.WebhookSink(server.url)
    hook.write(Batch(steps=[step(0, 1.0)], events=[ended(f"{verdict}; exit code 0", evidence={"verdict": verdict})]))
    hook.close()
    assert server.bodies[-1]["severity"] == severity
    assert f"[{severity}] end: {verdict}" in server.bodies[-1]["text"]


def test_a_captured_step_is_sent_with_the_alarm_though_its_own_severity_is_info(server):
    hook = sf.WebhookSink(server.url)
    kept = {"incident": "run/incidents/7", "replay": "surefoot replay run/incidents/7"}
    events = [alarm(), event("alarm", 7, "the first bad step was captured", cause="incident", evidence=kept)]
    hook.write(of(*events))
    hook.close()
    (body,) = server.bodies
    assert (body["severity"], body["incident"], body["replay"]) == ("error", kept["incident"], kept["replay"])
    assert "replay: surefoot replay run/incidents/7" in body["text"]


def test_a_message_about_a_loss_that_stays_nan_names_the_step_since_when(server):
    hook = sf.WebhookSink(server.url)
    losses = [2.0, float("nan"), 1.0, *[float("nan")] * 5]
    hook.write(Batch(steps=[step(number, loss) for number, loss in enumerate(losses)], events=[ended()]))
    hook.close()
    body = server.bodies[-1]
    assert (body["loss"], body["nonfinite_since"]) == (1.0, 3)
    assert "step 7; loss nan since step 3; last finite loss 1 (at first 2, lowest 1)" in body["text"]


def test_a_run_log_that_is_closed_sends_how_the_run_ended_and_what_was_lost(server, tmp_path):
    with sf.RunLog(tmp_path, sinks=[sf.WebhookSink(server.url)], device_seconds=None) as log:
        log.take(step(1))
        log.take("what is this")
        log.flush()
    body = server.bodies[-1]
    assert (body["event"], body["step"], body["dropped"]) == ("end", 1, 1)
    assert body["command"] == f"surefoot report {tmp_path}"
    assert "1 rows or messages were dropped" in body["text"]


def test_the_message_about_an_error_that_ended_the_run_names_it(server, tmp_path):
    with contextlib.suppress(KeyError), sf.RunLog(tmp_path, sinks=[sf.WebhookSink(server.url)]) as log:
        log.take(step(1))
        raise KeyError("labels")
    assert server.bodies[-1]["summary"] == "the program ended with KeyError: 'labels'"
    assert server.bodies[-1]["severity"] == "error"


def test_rows_that_a_sink_lost_are_counted_in_the_log_and_in_a_warning(tmp_path, caplog):
    class Broken:
        def write(self, batch):
            raise OSError("no")

        def close(self):
            pass

    log = sf.RunLog(tmp_path, sinks=[Broken()], device_seconds=None)
    (runner,) = log._writer._runners
    runner._queue.give_up()
    log.take(step(1))
    log.flush()
    log.close()
    (event,) = [event for event in sf.load_run(tmp_path).events if event.cause == "sink.dropped"]
    assert (event.severity, event.evidence) == ("info", {"dropped": 1, "sink": "Broken"})
    assert any("Broken: 3 rows and events in all did not reach it" in message for message in caplog.messages)
    assert sf.load_run(tmp_path).dropped == 0


def test_heartbeats_come_at_their_interval_and_stop_while_the_run_is_stalled(server, clock):
    hook = sf.WebhookSink(server.url, severities=(), heartbeat_seconds=300, run="exp1")
    hook.tick()
    hook.tick()
    assert [body["event"] for body in server.bodies] == ["heartbeat"]
    assert (server.bodies[0]["step"], server.bodies[0]["next_seconds"]) == (None, 300)
    hook.write(Batch(steps=[step(41, 0.5)], events=[event("checkpoint", 40, "saved")]))
    clock.now += 299
    hook.tick()
    assert len(server.bodies) == 1
    clock.now += 1
    hook.tick()
    assert (server.bodies[1]["step"], server.bodies[1]["loss"], server.bodies[1]["checkpoint_step"]) == (41, 0.5, 40)
    hook.write(Batch(events=[event("alarm", 41, "no step", severity="warning", cause=STALLED)]))
    clock.now += 3600
    hook.tick()
    assert len(server.bodies) == 2, "silence is the alarm, and `severities` asks for no other"
    hook.write(Batch(steps=[step(42, 0.5)]))
    assert server.bodies[2]["step"] == 42
    hook.close()


def test_a_heartbeat_that_is_lost_is_sent_again_before_the_receiver_misses_it(server, clock, caplog):
    server.answers = [(500, {})]
    hook = sf.WebhookSink(server.url, heartbeat_seconds=300)
    hook.tick()
    assert "a heartbeat was not delivered (HTTP 500)" in caplog.messages[0]
    clock.now += webhook.HEARTBEAT_RETRY_SECONDS
    hook.tick()
    assert len(server.bodies) == 1
    hook.close()


@pytest.mark.parametrize("cause", [STALLED, SLOW, NO_CHECKPOINT, LOADER_STALLED])
def test_alarms_about_the_progress_are_sent_though_they_are_warnings(server, cause):
    hook = sf.WebhookSink(server.url)
    hook.write(of(event("alarm", 8, "slow", severity="warning", cause=cause)))
    hook.write(of(event("alarm", 9, "as before", cause=cause), event("alarm", 9, "hot", severity="warning")))
    hook.close()
    assert [alert["cause"] for body in server.bodies for alert in body["alerts"]] == [cause]


def test_a_heartbeat_every_millisecond_is_refused(server):
    with pytest.raises(SettingError, match="heartbeat_seconds"):
        sf.WebhookSink(server.url, heartbeat_seconds=0.001)
