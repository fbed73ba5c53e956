"""Real trouble: processes killed while writing, full disks, vanished and read-only folders, damaged files."""

import logging
import os
import shutil
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forked
import patience
from surefoot import CheckpointError, CheckpointManager, UsageError
from surefoot.keep.checkpoint.manifest import MANIFEST, STATE, TENSORS, verify
from surefoot.keep.staging import Staged


def state(value):
    return {"weight": torch.full((64,), float(value)), "value": value}


def saved(manager, step, **options):
    return manager.save(state(step), step, blocking=True, **options)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


HEAD = """
import os, sys, signal, random, time, logging, torch
from pathlib import Path
from surefoot import CheckpointManager
logging.basicConfig(level='INFO')
torch.set_num_threads(1)
"""


@pytest.fixture(scope="module")
def run():
    """Runs a script in a real process of its own, with the parts that every script below needs."""
    paths = os.pathsep.join([str(Path(forked.__file__).parent), forked.SOURCE])
    environment = forked.environment(PYTHONPATH=paths)
    return lambda code, *arguments: forked.run(
        ["-c", HEAD + textwrap.dedent(code), *arguments], env=environment, whole=True
    )


# ---- killed ---------------------------------------------------------------------------------------------------------

KILLED = """
folder, cut_short = Path(sys.argv[1]), 0
random.seed(0)

def names():
    return [path.name for path in (folder / "checkpoints").glob("*")]

def stopped_in_the_middle_of_writing(child):
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    if any(name.startswith(".") for name in names()):
        return True
    os.kill(child, signal.SIGCONT)
    return False

for attempt in range(12):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        manager = CheckpointManager(folder, every_steps=1, keep_last=2)
        loaded = manager.load()
        step = loaded.step if loaded else 0
        os.write(writer, b"!")
        while True:
            step += 1
            manager.save({"w": torch.full((500_000,), float(step)), "step": step}, step, metric=-step)
            while not manager.due(step + 1):
                time.sleep(0.0005)
    before = names()
    os.read(reader, 1)
    if attempt % 2:
        while not {name for name in names() if not name.startswith(".")} - set(before):
            time.sleep(0.0005)
        time.sleep(random.uniform(0.0, 0.05))
    else:
        while not stopped_in_the_middle_of_writing(child):
            time.sleep(random.uniform(0.0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut_short += any(name.startswith(".") for name in names())
    manager = CheckpointManager(folder)
    assert not [path for path in (folder / "checkpoints").glob(".*")], "leftovers"
    for info in manager.checkpoints():
        found = manager.load(info.step)
        assert found.tree["step"] == info.step and bool((found.tree["w"] == info.step).all())
    loaded = manager.load()
    assert loaded is None or loaded.step == max(info.step for info in manager.checkpoints())
print("cut short", cut_short, "reached", loaded.step)
"""


def test_a_process_killed_twelve_times_while_writing_never_leaves_a_corrupt_checkpoint(run, tmp_path):
    done = run(KILLED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    cut_short, reached = (int(word) for word in done.stdout.split() if word.isdigit())
    assert cut_short >= 6
    assert reached >= 6


def test_a_script_that_ends_waits_for_its_last_checkpoint_and_one_more_at_exit(run, tmp_path):
    code = """
    import atexit
    at_exit, last = (CheckpointManager(folder) for folder in sys.argv[1:])
    atexit.register(lambda: at_exit.save({'w': torch.ones(2_000_000)}, 1))
    last.save({'w': torch.ones(2_000_000)}, 1)
    """
    done = run(code, tmp_path / "at exit", tmp_path / "last")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("at exit", "last"):
        assert CheckpointManager(tmp_path / name).load().tree["w"].sum() == 2_000_000


def test_after_a_fork_the_copy_refuses_to_save_and_does_not_hang(run, tmp_path):
    code = """
    from surefoot import UsageError
    manager = CheckpointManager(sys.argv[1])
    manager.save({'w': torch.ones(3_000_000)}, 1)
    if (child := os.fork()) == 0:
        try:
            manager.wait()
            manager.save({}, 2)
        except UsageError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [each.step for each in CheckpointManager(tmp_path).checkpoints()] == [1]


# ---- no place to write ----------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_costs_one_warning_and_no_checkpoint(run, tmp_path):
    code = """
    import resource
    manager = CheckpointManager(sys.argv[1], every_steps=1)
    assert manager.save({"w": torch.ones(100)}, 1, blocking=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    for step in (2, 3, 4):
        assert manager.due(step)
        manager.save({"w": torch.ones(1_000_000)}, step)
        manager.wait()
        assert isinstance(manager.last_error, OSError) and manager.due(step + 1)
    assert [path.name for path in (Path(sys.argv[1]) / "checkpoints").iterdir()] == ["step-00000001"]
    assert manager.load().step == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert manager.save({"w": torch.ones(1_000_000)}, 5, blocking=True) and manager.last_error is None
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert [line.split(":")[0] for line in told] == ["WARNING", "INFO"]
    assert "File too large" in told[0]
    assert "step 5 is on the disk" in told[1]


def test_a_read_only_folder_costs_one_warning_and_no_checkpoint(run, tmp_path):
    code = """
    import permissions
    folder = Path(sys.argv[1])
    manager = CheckpointManager(folder, every_steps=1)
    assert manager.save({"w": torch.ones(100)}, 1, blocking=True)
    permissions.obey()
    (folder / "checkpoints").chmod(0o555)
    for step in (2, 3):
        assert not manager.save({"w": torch.ones(100)}, step, blocking=True)
    assert manager.due(4) and manager.load().step == 1
    (folder / "checkpoints").chmod(0o755)
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "Permission denied" in done.stderr


def test_a_folder_that_vanishes_is_made_anew_and_that_is_said(tmp_path, caplog):
    manager = CheckpointManager(tmp_path / "run")
    assert saved(manager, 1)
    shutil.rmtree(tmp_path / "run")
    assert saved(manager, 2)
    assert saved(manager, 3)
    assert [line for line in warnings(caplog) if "was deleted with the checkpoints" in line] == warnings(caplog)
    assert len(warnings(caplog)) == 1
    assert [each.step for each in manager.checkpoints()] == [3, 2]


@pytest.mark.parametrize("where", ["run", "run/checkpoints"])
def test_a_file_in_the_folders_place_costs_one_warning_until_it_is_gone(tmp_path, caplog, where):
    caplog.set_level(logging.INFO)
    place = tmp_path / where
    place.parent.mkdir(exist_ok=True)
    place.write_text("mine")
    manager = CheckpointManager(tmp_path / "run", every_steps=1)
    for step in (1, 2, 3):
        assert not saved(manager, step)
        assert manager.due(step + 1)
    assert len(warnings(caplog)) == 1
    assert place.read_text() == "mine"
    place.unlink()
    assert saved(manager, 4)
    assert "step 4 is on the disk" in caplog.records[-1].getMessage()
    place = place if place.name == "checkpoints" else place / "checkpoints"
    shutil.rmtree(place)
    place.write_text("again")
    assert not saved(manager, 5)
    assert len(warnings(caplog)) == 2


def test_a_state_that_cannot_be_saved_is_the_callers_mistake(tmp_path):
    manager = CheckpointManager(tmp_path, every_steps=1)
    with pytest.raises(UsageError, match=r"scheduler\.lambda is a builtins\.function"):
        manager.save({"scheduler": {"lambda": lambda step: 1.0}}, 1)
    assert manager.due(1)
    assert saved(manager, 1)


class Failing(Staged):
    def wait(self):
        raise MemoryError("no pinned memory is left")


def test_a_copy_that_fails_is_reported_and_training_continues(tmp_path, caplog):
    manager = CheckpointManager(tmp_path, every_steps=1)
    manager.save(None, 1, staged=Failing(state(1)))
    manager.wait()
    assert isinstance(manager.last_error, MemoryError)
    assert "no pinned memory is left" in warnings(caplog)[0]
    assert manager.due(2)


class Late(Staged):
    clock = patience.Clock()

    def wait(self):
        self.clock.now += 2.0
        raise OSError(5, "Input/output error")


def test_a_slow_failure_is_not_repeated_at_every_step(tmp_path, monkeypatch):
    for module in ("manager", "writer"):
        monkeypatch.setattr(f"surefoot.keep.checkpoint.{module}.time", Late.clock)
    manager = CheckpointManager(tmp_path, every_steps=1)
    manager.save(None, 1, staged=Late(state(1)))
    manager.wait()
    assert manager.due(2)
    assert not manager.save(state(2), 2)
    assert manager.postponed == 1
    Late.clock.now += 20.0
    assert manager.save(state(3), 3)
    assert manager.load().step == 3


def test_threads_that_save_at_once_take_turns(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=9)
    threads = [threading.Thread(target=saved, args=(manager, step)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.step for each in manager.checkpoints()) == list(range(6))


# ---- damaged --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    manager = CheckpointManager(tmp_path_factory.mktemp("two"))
    saved(manager, 1)
    saved(manager, 2)
    return manager


@given(st.sampled_from([TENSORS, STATE, MANIFEST]), st.floats(0, 1, exclude_max=True), st.integers(-1, 7))
def test_loading_falls_back_to_the_older_one_and_says_so(two, name, where, bit):
    """A flipped bit, or for -1 a cut, anywhere in any file of the newer one."""
    file = two.folder / "checkpoints" / "step-00000002" / name
    whole = file.read_bytes()
    changed = bytearray(whole)
    place = int(where * len(whole))
    if bit < 0:
        del changed[place:]
    else:
        changed[place] ^= 1 << bit
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = told.append
    logging.getLogger("surefoot").addHandler(handler)
    try:
        file.write_bytes(changed)
        loaded = two.load()
        with pytest.raises(CheckpointError, match=f"step-00000002/{name}"):
            two.load(2)
    finally:
        file.write_bytes(whole)
        logging.getLogger("surefoot").removeHandler(handler)
    assert (loaded.step, loaded.tree["value"]) == (1, 1)
    assert len(told) == 1
    assert f"step-00000002/{name}" in told[0].getMessage()
    assert "step 1 is loaded instead" in told[0].getMessage()
    verify(file.parent)


def test_where_all_are_damaged_that_is_an_error_and_not_a_fresh_start(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        saved(manager, step)
        (tmp_path / "checkpoints" / f"step-0000000{step}" / STATE).write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-00000002/state.json.*step-00000001/state.json"):
        manager.load()


def test_what_cannot_be_read_is_never_deleted(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    (tmp_path / "checkpoints" / "step-00000001" / MANIFEST).write_text("of a later version")
    (tmp_path / "checkpoints" / "notes").mkdir()
    for step in (2, 3):
        saved(manager, step)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["notes", "step-00000001", "step-00000003"]
    (tmp_path / "checkpoints" / "step-00000003").rename(tmp_path / "checkpoints" / "step-00000009")
    with pytest.raises(CheckpointError, match="renamed"):
        manager.load(9)


def test_leftovers_of_the_dead_go_and_those_of_other_ranks_stay(tmp_path):
    place = tmp_path / "checkpoints"
    mine, other = ".step-00000001.999999999-1-00000000.part", ".step-00000001.rank-1.999999999-1-00000000.gone"
    (place / mine).mkdir(parents=True)
    (place / other).mkdir()
    CheckpointManager(tmp_path)
    assert [path.name for path in place.iterdir()] == [other]
    CheckpointManager(tmp_path, rank=1, world_size=2)
    assert list(place.iterdir()) == []
