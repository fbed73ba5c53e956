"""Disks that fail: training goes on, one warning says so, and what can be kept is kept."""

import shutil

import pytest

from patience import HANG_SECONDS
from quiet_log import QuietLog
from runlogs import event, layer_rows, run, step_row, warnings
from surefoot import load_run


@pytest.fixture(autouse=True)
def tried_again_soon(monkeypatch):
    monkeypatch.setattr("surefoot.record.writer.RETRY_SECONDS", 0.01)


def test_a_disk_that_is_full_costs_one_warning_and_the_rows_of_that_time(tmp_path):
    code = """
    import resource
    import surefoot.record.writer as writer
    writer.RETRY_SECONDS = 0.01
    folder = Path(sys.argv[1])
    log = RunLog(folder, device_seconds=None)
    for step in range(100):
        log.take(step_row(step))
    assert log.flush(HANG_SECONDS)
    full = max(path.stat().st_size for path in (folder / "telemetry").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    for step in range(100, 200):
        log.take(step_row(step))
        log.take(layer_rows(step, layers=100))
        if step % 10 == 0:
            log.event("spike", step, "a spike " + "x" * 2000)
        if step % 20 == 0:
            assert not log.flush(HANG_SECONDS)
    assert log.dropped
    before = load_run(folder)
    assert before.scalars["step"].to_pylist()[:100] == list(range(100)), "what was there stays"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for step in range(200, 300):
        log.take(step_row(step))
    assert log.flush(HANG_SECONDS)
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert [line.split(":")[0] for line in told] == ["WARNING", "INFO"], done.stderr
    assert "File too large" in told[0]
    tables = load_run(tmp_path)
    steps = tables.scalars["step"].to_pylist()
    assert steps[:100] + steps[-100:] == [*range(100), *range(200, 300)]
    assert tables.problems == []
    assert [each.step for each in tables.events if each.event == "spike"] == list(range(100, 200, 10)), "events waited"
    assert tables.dropped >= 100


def test_a_read_only_folder_costs_one_warning(tmp_path):
    code = """
    import surefoot.record.writer as writer
    writer.RETRY_SECONDS = 0.01
    import permissions
    folder = Path(sys.argv[1])
    RunLog(folder / "before", device_seconds=None).close()  # imports all that a log needs
    permissions.obey()
    folder.chmod(0o555)
    log = RunLog(folder / "run", device_seconds=None)
    for step in range(5):
        log.take(step_row(step))
        assert not log.flush(HANG_SECONDS)
    assert log.dropped == 5
    folder.chmod(0o755)
    log.take(step_row(5))
    assert log.flush(HANG_SECONDS)
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "Permission denied" in done.stderr
    assert load_run(tmp_path / "run").scalars["step"].to_pylist() == [5]
    assert load_run(tmp_path / "run").dropped == 5


@pytest.mark.parametrize("what", ["run", "run/telemetry"])
def test_a_folder_that_vanishes_is_begun_anew_and_that_is_said(tmp_path, caplog, what):
    log = QuietLog(tmp_path / "run")
    for step in (1, 2):
        log.take(step_row(step))
        assert log.flush(HANG_SECONDS)
    shutil.rmtree(tmp_path / what)
    for step in (3, 4):
        log.take(step_row(step))
        log.take(event(step))
        assert log.flush(HANG_SECONDS)
    log.close()
    tables = load_run(tmp_path / "run")
    assert tables.scalars["step"].to_pylist() == [3, 4]
    assert [each.step for each in tables.events if each.event != "end"] == [3, 4]
    assert len(warnings(caplog)) == 1
    assert "was deleted" in warnings(caplog)[0]


def test_a_file_in_the_folders_place_costs_one_warning_until_it_is_gone(tmp_path, caplog):
    (tmp_path / "run").write_text("mine")
    log = QuietLog(tmp_path / "run")
    for step in range(3):
        log.take(step_row(step))
        log.take(layer_rows(step))
        assert not log.flush(HANG_SECONDS)
    assert len(warnings(caplog)) == 1
    assert (tmp_path / "run").read_text() == "mine"
    (tmp_path / "run").unlink()
    log.take(step_row(3))
    assert log.flush(HANG_SECONDS)
    log.close()
    assert load_run(tmp_path / "run").scalars["step"].to_pylist() == [3]
    assert log.dropped == 6


def test_trying_again_and_again_leaves_nothing_behind(tmp_path):
    code = """
    import resource
    import surefoot.record.writer as writer
    writer.RETRY_SECONDS = 0.0
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    log = RunLog(sys.argv[1])
    for step in range(50):
        log.take(step_row(step))
        log.take(layer_rows(step))
        log.event("spike", step, "a spike")
        assert not log.flush(HANG_SECONDS)
    left = [path.name for path in Path(sys.argv[1]).rglob("*") if path.is_file()]
    assert len(left) <= 2, left
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1
