"""The sinks that `surefoot run` adds to its log: `--progress`, `--tensorboard`, `--webhook-env`.

This module imports nothing that the interpreter has not already loaded (see `watch.run_script`).
"""

from __future__ import annotations

import os

from surefoot.watch.messages import print_line, stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from surefoot.commands.run_options import Request


class Sinks:
    """Made when the log is opened, from the folder and the environment in which the command was started."""

    def __init__(self, request: Request, of_rank: str) -> None:
        self._request, self._of_rank, self._here = request, of_rank, os.getcwd()
        self._address = os.environ.get(request.webhook_env or "")

    def make(self) -> list[Any]:
        """Those that were asked for and can be made."""
        made = (self._progress(), self._tensorboard(), self._webhook())
        return [sink for sink in made if sink is not None]

    def _progress(self) -> Any:
        if not self._request.progress:
            return None
        from surefoot.report.terminal.progress import ProgressSink

        return ProgressSink(stream=stream())

    def _tensorboard(self) -> Any:
        if self._request.tensorboard is None:
            return None
        from surefoot.record.sinks.tensorboard import TensorBoardSink

        folder = os.path.join(self._here, self._request.tensorboard)
        return _made("--tensorboard", TensorBoardSink, os.path.join(folder, self._of_rank) if self._of_rank else folder)

    def _webhook(self) -> Any:
        if self._request.webhook_env is None:
            return None
        from surefoot.record.sinks.webhook import WebhookSink

        script = os.path.splitext(os.path.basename(self._request.target.name))[0]
        run = f"{script} {self._of_rank}".rstrip()
        beat = self._request.heartbeat
        return _made("--webhook-env", WebhookSink, self._address or "", run=run, heartbeat_seconds=beat)


def _made(option: str, sink: Any, *arguments: Any, **settings: Any) -> Any:
    """A sink; `None`, and a line on stderr, if it cannot be made: the script continues without it."""
    from surefoot.errors import SurefootError

    try:
        return sink(*arguments, **settings)
    except (SurefootError, OSError, ImportError, ValueError) as error:
        print_line(f"surefoot: {option} is ignored: {' '.join(str(error).split())}")
        return None
