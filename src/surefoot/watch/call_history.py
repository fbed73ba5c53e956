"""The calls that a tensor was made from, looked up in the recorder of a sampled step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from surefoot.record.facts import CallSite
from surefoot.watch.operation_names import PRODUCTS, RECURRENT, VIEWS, WEIGHT_LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.watch.function_recorder import FunctionRecorder, RecordedCall


class CallPlace(TypedDict):
    """Identifies the call that a fact is about."""

    op: str
    site: str
    module: str
    index: int
    step: int


class CallHistory:
    """Finds what a tensor was made from. Without a recorder, it finds nothing."""

    def __init__(
        self, step: int, parameter_id: Callable[[Tensor], int | None], recorder: FunctionRecorder | None
    ) -> None:
        self._step, self._parameter_id, self.recorder = step, parameter_id, recorder

    def place(self, entry: RecordedCall) -> CallPlace:
        """The place of a recorded call, as fields of the facts."""
        return {
            "op": entry.name,
            "site": entry.site,
            "module": entry.module,
            "index": entry.index,
            "step": self._step,
        }

    def parameter_of(self, tensor: Tensor) -> int | None:
        """The number of the parameter that a tensor is, or is a view of."""
        number = self._parameter_id(tensor)
        if number is None and self.recorder is not None and (maker := self.recorder.maker(tensor)) is not None:
            entry = self.recorder.entries[maker]
            if entry.name in VIEWS and len(entry.parameters) == 1:
                return entry.parameters[0]
        return number

    def producer(self, tensor: Any) -> CallSite | None:
        """The call that computed the values of a tensor, looking through views and copies."""
        if self.recorder is None or not isinstance(tensor, Tensor):
            return None
        index = self.recorder.maker(tensor)
        for _ in range(50):
            if index is None:
                return None
            entry = self.recorder.entries[index]
            if entry.name not in VIEWS or not entry.inputs:
                return CallSite(op=entry.name, site=entry.site, module=entry.module, index=entry.index)
            index = entry.inputs[0]
        return None

    def is_of_model(self, tensor: Any, limit: int = 60) -> bool:
        """Whether a layer made a tensor. A matrix product of data counts only inside a module or with a parameter."""
        if self.recorder is None or not isinstance(tensor, Tensor):
            return False
        made = self.recorder.history(self.recorder.maker(tensor), limit)
        layers = [entry for entry in made if entry.name in WEIGHT_LAYERS | RECURRENT]
        return any(entry.name not in PRODUCTS or entry.parameters or entry.module for entry in layers)

    def names(self, tensor: Any, limit: int = 60) -> set[str]:
        """The names of the calls a tensor was made from."""
        if self.recorder is None or not isinstance(tensor, Tensor):
            return set()
        return {entry.name for entry in self.recorder.history(self.recorder.maker(tensor), limit)}
