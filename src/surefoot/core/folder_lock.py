"""One writer per folder: a lock that the kernel releases when its process ends, in whatever way.

It is a POSIX record lock on a hidden file. Such a lock belongs to the process: a forked data loading worker does not
hold it, so it is released when the training process ends, even if killed. It works across machines if the file system
supports it (NFSv4 does). Where there are no locks (Windows, some network file systems), nothing is refused.

The file contains its owner, for the message that the second process gets. It is never deleted: that would be a race.
Within one process a lock may be taken any number of times, because two stabilizers may share a folder. Reading needs no
lock.

This module imports nothing that the interpreter has not already loaded: `surefoot run` takes the lock before the script
starts.
"""

from __future__ import annotations

import _thread
import errno
import os
import sys
import time

from surefoot.core.files import OwnedFile
from surefoot.errors import FolderInUse

TRIES, PAUSE_SECONDS = 5, 0.05
"""How long to retry: a process that only cleans up holds the lock briefly."""
_CONFLICT = (errno.EAGAIN, errno.EACCES)
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The environment variables of torchrun, srun and mpirun for the rank and the number of processes."""


class _Lock:
    """One lock file that this process has locked, and the number of its holders."""

    def __init__(self, path: str, file: OwnedFile) -> None:
        self.path, self.file, self.process, self.holds = path, file, os.getpid(), 0

    @property
    def is_held(self) -> bool:
        """Whether this process holds it, and the file is still the one that others would lock.

        The kernel drops the lock when any code in the process closes the file, as copying the folder does. So it is
        taken again here, which has no effect if it is held.
        """
        if self.process != os.getpid() or not self.file.is_at(self.path):
            return False
        try:
            os.lockf(self.file.number, os.F_TLOCK, 0)
        except OSError:
            return False
        return True


_locks: dict[str, _Lock] = {}
_guard = _thread.RLock()


class Hold:
    """A lock that is held until `release`."""

    def __init__(self, lock: _Lock | None) -> None:
        self._lock = lock

    @property
    def is_held(self) -> bool:
        """Whether it excludes other processes."""
        return self._lock is not None and self._lock.is_held

    def release(self) -> None:
        """Release it. May be called again, and in a forked process."""
        with _guard:
            lock, self._lock = self._lock, None
            if lock is None or lock.process != os.getpid():
                return
            lock.holds -= 1
            if lock.holds == 0:
                if _locks.get(lock.path) is lock:
                    del _locks[lock.path]
                lock.file.close()


def hold(folder: str | os.PathLike[str], what: str, rank: int = 0) -> Hold:
    """Prevent other processes from writing `what` ("log", "checkpoints") into a folder.

    Every rank of a job has its own lock. Raises `FolderInUse`, and `OSError` if a link has the lock's name.
    """
    part = f".rank-{rank}" if rank else ""
    path = os.path.join(os.path.realpath(folder), f".{what}{part}.lock")
    with _guard:
        lock = _locks.get(path)
        if lock is None or not lock.is_held:
            lock = _taken(path, os.fspath(folder), what)
            if lock is None:
                return Hold(None)
            _locks[path] = lock
        lock.holds += 1
        return Hold(lock)


def rank_of_process() -> int:
    """The rank of this process, from torch.distributed or a launcher; 0 if it is alone.

    If several launchers have set variables, the first is used: torchrun may itself be started by srun.
    """
    distributed = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)  # absent while torch is being imported
    if distributed is not None and initialized is not None and initialized():
        return int(distributed.get_rank())
    for name, of in _LAUNCHERS:
        word = os.environ.get(name, "")
        if word.isdecimal():
            return int(word) if os.environ.get(of, "") != "1" else 0
    return 0


def _taken(path: str, folder: str, what: str) -> _Lock | None:
    """The lock; `None` if locking is not supported."""
    if not hasattr(os, "lockf"):
        return None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = OwnedFile(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, "it is a link where a lock file is expected; nothing is written there", path
            ) from None
        return None  # the code that writes will report what is wrong with the folder
    try:
        for attempt in range(TRIES):
            try:
                os.lockf(file.number, os.F_TLOCK, 0)
                break
            except OSError as error:
                if error.errno not in _CONFLICT:
                    file.close()
                    return None
                if attempt == TRIES - 1:
                    raise FolderInUse(_message(folder, what, file.number)) from None
            time.sleep(PAUSE_SECONDS)
        _sign(file.number)
        return _Lock(path, file)
    except BaseException:
        file.close()
        raise


def _sign(descriptor: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}, since {since}\n".encode(), 0)
    except OSError:  # a full disk: the lock still works
        return


def _message(folder: str, what: str, descriptor: int) -> str:
    try:
        owner = os.pread(descriptor, 300, 0).decode("utf-8", "replace").strip()
    except OSError:
        owner = ""
    files = "a run log" if what == "log" else what
    return (
        f"another process is writing {files} into {folder}: {owner or 'its name is not known'}. Two processes in one "
        "folder would overwrite each other's files. Stop that process, or use another folder."
    )
