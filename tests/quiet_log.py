"""A run log that holds what a test puts into it, and nothing that the machine adds."""

from functools import partial

from surefoot import RunLog

QuietLog = partial(RunLog, device_seconds=None)
