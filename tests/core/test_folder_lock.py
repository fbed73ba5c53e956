"""Two processes never write into one folder, and two stabilizers never share a CheckpointManager."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import patience
import surefoot as sf
from patience import HANG_SECONDS
from surefoot.core.folder_lock import hold, rank_of_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLDER = """
import os, sys
from surefoot.core.folder_lock import hold, rank_of_process
kept = [hold(sys.argv[1], "log"), hold(sys.argv[1], "checkpoints")]
child = os.fork()
if child == 0:  # as a data loading worker that outlives the training
    import time
    time.sleep(600)
print(child, flush=True)
sys.stdin.read()
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.stderr and process.stderr.read()
    return line


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the locks, and has a child that does not."""
    process = started("-c", HOLDER, str(folder))
    child = int(first_line(process))
    try:
        yield process
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.communicate()


def stabilizer(model: nn.Module, **settings: Any) -> sf.TrainingStabilizer:
    return sf.TrainingStabilizer(model, torch.optim.AdamW(model.parameters()), **settings)


def step(guard: sf.TrainingStabilizer, model: nn.Module) -> None:
    guard.backward(model(torch.ones(2, 4)).square().mean())
    guard.step()


# ---- two processes ------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_who_is_first_until_that_one_is_killed(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    manager = sf.CheckpointManager(tmp_path)
    with holder(tmp_path) as process:
        first = rf"process {process.pid} on .*, since 20\d\d-"
        with pytest.raises(sf.FolderInUse, match=first):
            stabilizer(model, checkpoints=manager)
        with pytest.raises(sf.FolderInUse, match=first):
            stabilizer(model, log=tmp_path)
        with pytest.raises(sf.FolderInUse, match=first):
            manager.save({"w": torch.ones(1)}, 1)
        assert manager.load() is None  # reading needs no lock
        assert next(iter(model.parameters()))._backward_hooks is None
        process.kill()  # its own child lives on
        process.wait()
        guard = stabilizer(model, checkpoints=manager, log=tmp_path)
        step(guard, model)
        guard.save()
        assert guard.log is not None
        guard.log.close()


def test_surefoot_run_ends_before_the_script_where_another_process_writes(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("print('up', flush=True)\ninput()\n")
    (tmp_path / "second.py").write_text("print('ran')\n")
    run = ("-m", "surefoot", "run", "--out", str(tmp_path / "out"))
    first = started(*run, str(tmp_path / "waits.py"))
    try:
        assert first_line(first) == "up"
        second = started(*run, str(tmp_path / "second.py"))
        out, err = second.communicate(timeout=HANG_SECONDS)
        assert second.returncode == 2
        assert out == ""
        assert f"process {first.pid} on " in err
        assert "Traceback" not in err
    finally:
        first.communicate("\n", timeout=HANG_SECONDS)
    again = started(*run, str(tmp_path / "second.py"))
    assert again.communicate(timeout=HANG_SECONDS)[0] == "ran\n"
    assert again.returncode == 0


def test_ranks_of_a_job_share_a_folder(tmp_path: Path) -> None:
    with holder(tmp_path):
        assert sf.CheckpointManager(tmp_path, rank=1, world_size=2).save({"w": torch.ones(1)}, 1, blocking=True)
        with pytest.raises(sf.FolderInUse):
            sf.CheckpointManager(tmp_path, rank=0, world_size=2).save({"w": torch.ones(1)}, 1, blocking=True)


def test_a_process_may_hold_a_folder_many_times_and_gives_it_up_with_the_last(tmp_path: Path) -> None:
    code = "import sys; from surefoot.core.folder_lock import hold; hold(sys.argv[1], 'log'); print('free')"

    def is_free() -> bool:
        return patience.run([sys.executable, "-c", code, tmp_path]).stdout == "free\n"

    one, other = hold(tmp_path, "log"), hold(tmp_path, "log")
    one.release()
    one.release()
    assert not is_free()
    other.release()
    assert is_free()


def test_a_log_gives_its_folder_up_when_it_is_closed_and_a_manager_when_it_is_gone(tmp_path: Path) -> None:
    log = sf.RunLog(tmp_path, device_seconds=None)
    with sf.CheckpointManager(tmp_path) as manager:
        assert manager.save({"w": torch.ones(1)}, 1, blocking=True)
    log.close()
    with holder(tmp_path):  # takes both
        pass


def test_a_folder_that_cannot_be_locked_is_no_reason_to_stop(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    assert not hold(place, "log").is_held
    stabilizer(nn.Linear(4, 1), checkpoints=sf.CheckpointManager(place))


def is_free(folder: Path) -> bool:
    """Whether another process could lock the file."""
    code = "import os, sys; os.lockf(os.open(sys.argv[1], os.O_RDWR), os.F_TEST, 0)"
    asked = [sys.executable, "-I", "-S", "-c", code, str(folder / ".log.lock")]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert done.returncode == 0 or "BlockingIOError" in done.stderr or "PermissionError" in done.stderr
    return done.returncode == 0


def test_a_lock_that_a_copy_of_the_folder_has_dropped_is_taken_again(tmp_path: Path) -> None:
    held = hold(tmp_path / "run", "log")
    assert not is_free(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert is_free(tmp_path / "run")  # the kernel's rule for such locks
    assert held.is_held
    assert not is_free(tmp_path / "run")
    held.release()


def test_a_lock_that_another_process_has_got_meanwhile_does_not_stand(tmp_path: Path) -> None:
    held = hold(tmp_path, "log")
    (tmp_path / ".log.lock").read_bytes()  # drops it
    with holder(tmp_path):
        assert not held.is_held
        with pytest.raises(sf.FolderInUse):
            hold(tmp_path, "log")
    assert held.is_held
    held.release()


def test_a_link_where_the_lock_file_belongs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in (".log.lock", ".checkpoints.lock"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"it is a link where a lock file is expected.*\.log\.lock"):
        sf.RunLog(tmp_path, device_seconds=None)
    manager = sf.CheckpointManager(tmp_path)
    assert manager.load() is None  # reading needs no lock
    with pytest.raises(OSError, match=r"it is a link.*\.checkpoints\.lock"):
        manager.save({"w": torch.ones(1)}, 1)
    assert (tmp_path / "precious").read_text() == "precious"


LAUNCHED: list[tuple[dict[str, str], int]] = [
    ({}, 0),
    ({"RANK": "2", "WORLD_SIZE": "4"}, 2),
    ({"RANK": "2", "WORLD_SIZE": "1"}, 0),
    ({"SLURM_PROCID": "3"}, 3),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, 3),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "1"}, 0),
    ({"RANK": "5", "WORLD_SIZE": "16", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 5),
    ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 0),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1),
    ({"PMI_RANK": "none"}, 0),
]


@pytest.mark.parametrize(("settings", "rank"), LAUNCHED)
def test_the_rank_is_what_the_launcher_says(
    settings: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {name for each, _ in LAUNCHED for name in each}:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert rank_of_process() == rank


def test_the_rank_is_first_of_all_what_torch_distributed_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "16")
    # This backend of torch's own needs no other process.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        assert rank_of_process() == 3
    finally:
        torch.distributed.destroy_process_group()
    assert rank_of_process() == 5


# ---- two stabilizers ----------------------------------------------------------------------------------------------


def test_one_manager_for_two_stabilizers_is_refused(tmp_path: Path) -> None:
    manager = sf.CheckpointManager(tmp_path, every_steps=None)
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    first, second = (stabilizer(model, checkpoints=manager) for model in models)
    for use in (first.save, first.restore, partial(step, first, models[0])):
        with pytest.raises(sf.UsageError, match=r"passed to two TrainingStabilizers.*also_save"):
            use()
    step(second, models[1])
    second.save()
    again = stabilizer(models[0], checkpoints=manager)  # one after the other, as in a notebook
    assert again.restore() == 1


def gan(folder: Path) -> tuple[list[nn.Module], tuple[sf.TrainingStabilizer, sf.TrainingStabilizer]]:
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (maker, critic)]
    manager = sf.CheckpointManager(folder, every_steps=5)
    return [maker, critic], sf.presets.for_gan(maker, optimizers[0], critic, optimizers[1], checkpoints=manager)


def play(folder: Path, stop: int | None = None) -> list[Any]:
    (maker, critic), (make, judge) = gan(folder)
    for noise in make.resume(list(torch.randn(20, 16, 2, generator=torch.Generator().manual_seed(1)))):
        judge.backward(F.softplus(critic(maker(noise).detach())).mean() + F.softplus(-critic(noise * 2 + 1)).mean())
        judge.step()
        make.backward(F.softplus(-critic(maker(noise))).mean())
        make.step()
        if make.steps == stop:
            break
    manager = make._run.persistence.checkpoints
    assert manager is not None
    manager.wait()
    assert make.steps == judge.steps == (stop or 20)
    return [value.clone() for model in (maker, critic) for value in model.state_dict().values()]


def test_both_models_of_a_gan_come_back_from_one_manager_bitwise(tmp_path: Path) -> None:
    expected = play(tmp_path / "undisturbed")
    play(tmp_path / "stopped", stop=13)
    assert all(map(torch.equal, play(tmp_path / "stopped"), expected))
