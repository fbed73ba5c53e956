"""Scripts in processes of their own, forked from one that has imported torch: a fork costs what an import does not.

Each runs as `python -c CODE ARGUMENTS...` would, and leaves as a Python program does, with its exit handlers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from patience import ended, start


class Forked:
    """The process that scripts are forked from. Starts with the first script."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._scratch = TemporaryDirectory(prefix="forked-")

    def __call__(self, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        if self._process is None:
            paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")])
            environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = start([sys.executable, __file__, self._scratch.name], env=environment, **pipes)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([code, list(map(str, arguments))]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        out, errors = (Path(self._scratch.name, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(code, status, out, errors)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            ended(self._process)
            self._process.stdout.close()
        self._scratch.cleanup()


def _serve(folder: str) -> None:
    """In that process: a script per line, one exit status back."""
    import gc

    import surefoot

    assert surefoot.CheckpointManager  # imports torch, and all that a checkpoint needs
    gc.freeze()  # what is imported needs no second look, and its pages stay shared
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code, arguments = json.loads(line)
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.argv = ["-c", *arguments]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            return
        os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


if __name__ == "__main__":
    _serve(sys.argv[1])
