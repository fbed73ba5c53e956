"""Calls of torch as the recorder of the export remembers them."""

from surefoot.core.operations import FunctionMode, without_modes
from surefoot.replay.export.call_recorder import CapturedCalls, keep_values, key_of, note_outputs, remember
from surefoot.replay.locate.frames import Place


class Remember(FunctionMode):
    """Remembers every function."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_function(self, func, args, kwargs):
        with without_modes():
            ran = remember(func, args, kwargs, operation=False)
            ran.place = Place(__file__, 1, "step")
        out = func(*args, **kwargs)
        with without_modes():
            note_outputs(ran, out)
        self.calls.append(ran)
        return out


def captured(step, **names):
    """The calls of a function, with copies of what went in and names for some tensors."""
    with Remember() as mode:
        step()
    return CapturedCalls(mode.calls, keep_values(mode.calls), {key_of(tensor): name for name, tensor in names.items()})
