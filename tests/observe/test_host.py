"""Memory of the process and the host, read from real files: this machine's, and folders laid out like others'."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from surefoot.observe.host import HostMemory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """A machine with 16 GiB, 10 of them available, and a process of 100 MiB; `cgroup` is written by the test."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {10 * 2**20} kB\n")
    (own / "statm").write_text("50000 25600 3 4 0 5 0\n")
    groups = tmp_path / "cgroup"
    groups.mkdir()
    return tmp_path / "proc", groups


def limited(folder, limit, current, reclaimable=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {reclaimable}\n")


def test_this_process_grows_when_it_takes_memory():
    host = HostMemory()
    before = host.read()
    ballast = np.ones(64 * MIB, dtype=np.uint8)
    after = host.read()
    assert after["process_memory"] - before["process_memory"] > 60 * MIB
    assert 0 < after["host_used"] <= after["host_total"]
    assert after["process_memory"] < after["host_total"]
    del ballast


def test_without_a_limit_the_machine_is_the_bound(machine):
    numbers = HostMemory(*machine).read()
    assert numbers["host_total"] == 16 * 2**30
    assert numbers["host_used"] == 6 * 2**30


def test_a_container_is_bound_by_its_limit_not_by_the_machine(machine):
    proc, groups = machine
    (proc / "self" / "cgroup").write_text("0::/box/inner\n")
    limited(groups / "box", 2 * 2**30, 2**30, reclaimable=2**28)
    limited(groups / "box" / "inner", "max", 2**29)
    numbers = HostMemory(proc, groups).read()
    assert numbers["host_total"] == 2 * 2**30
    assert numbers["host_used"] == 2**30 - 2**28


def test_a_path_from_outside_the_container_still_finds_the_limit_at_the_root(machine):
    proc, groups = machine
    (proc / "self" / "cgroup").write_text("0::/../../outside/abc\n")
    limited(groups, 2**30, 2**29)
    assert HostMemory(proc, groups).read()["host_total"] == 2**30


def test_a_limit_of_the_first_version_counts_and_its_absence_does_not(machine):
    proc, groups = machine
    (proc / "self" / "cgroup").write_text("5:devices:/\n4:memory:/job\n0::/\n")
    folder = groups / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.usage_in_bytes").write_text("1000000\n")
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert HostMemory(proc, groups).read()["host_total"] == 16 * 2**30
    (folder / "memory.limit_in_bytes").write_text(f"{2**30}\n")
    assert HostMemory(proc, groups).read()["host_total"] == 2**30


def test_a_limit_beyond_what_the_machine_has_is_no_bound(machine):
    proc, groups = machine
    (proc / "self" / "cgroup").write_text("0::/\n")
    limited(groups, 64 * 2**30, 2**29)
    assert HostMemory(proc, groups).read()["host_total"] == 16 * 2**30


def test_a_platform_without_these_files_is_silence(tmp_path):
    numbers = HostMemory(tmp_path, tmp_path).read()
    assert set(numbers) <= {"process_memory"}


def test_a_reading_opens_a_handful_of_small_files():
    host, opened, is_reading = HostMemory(), [], True
    sys.addaudithook(lambda event, arguments: event == "open" and is_reading and opened.append(str(arguments[0])))
    host.read()
    is_reading = False
    assert 1 <= len(opened) <= 4
    assert all(path.startswith(("/proc/", "/sys/")) for path in opened)
