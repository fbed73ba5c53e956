"""`surefoot run --eager-looks`: sampled steps run without compiled code, so that the operations inside are observed.

While a step is sampled, the stance of torch's compiler is `force_eager`; compiled code is kept and used again
afterwards, without recompilation. Eager kernels round differently from compiled ones, so such a run is not bitwise
equal to the script alone. Therefore it is an option.

The previous stance is restored when the step ends, or earlier if the script sets a stance itself, so that the script
never sees this one. With several processes, no step runs eagerly, because the ranks would not do the same at the same
step. Neither does a step that begins inside compiled code.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as module_hooks

from surefoot.observe.readable import has_other_ranks

if TYPE_CHECKING:
    from types import FrameType

EAGER_LOOKS = "eager looks"
"""The name of the probe. If it fails, compiled code runs as usual in sampled steps too."""
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
_COMPILER = os.path.join("torch", "_dynamo", "eval_frame.py")
_COMPILED_CALL = "compile_wrapper"
"""The function in that file that calls compiled code."""


class EagerStance:
    """Makes compiled code run eagerly for a while."""

    def __init__(self) -> None:
        self._before: Any = None
        """The stance to restore; `None` while it is the script's own."""
        self._is_setting = False
        self._only_ours = False
        """Whether there were no global module hooks before the sampled step."""

    def take(self) -> bool:
        """Make compiled code run eagerly until `release`. Returns whether it does."""
        if self._before is not None or has_other_ranks() or _is_in_compiled_call():
            return False
        from torch._dynamo import eval_frame

        self._only_ours = not module_hooks._has_any_global_hook()  # type: ignore[no-untyped-call]
        self._before = self._set(eval_frame.DynamoStance("force_eager"))
        return True

    def release(self) -> None:
        """Restore the stance."""
        before, self._before = self._before, None
        if before is not None:
            self._set(before)

    def is_taken(self) -> bool:
        """Whether compiled code runs eagerly now."""
        return self._before is not None

    def is_set_by_script(self) -> bool:
        """Whether the stance that is being set now is the script's."""
        return self.is_taken() and not self._is_setting

    def hides_hooks(self) -> bool:
        """Whether all global module hooks are surefoot's. Torch warns about any when a compiled model is called."""
        return self.is_taken() and self._only_ours

    def _set(self, stance: Any) -> Any:
        from torch._dynamo import eval_frame

        self._is_setting = True
        callback = _set_eval_frame(None)  # torch refuses to set a stance during a compilation
        try:
            return eval_frame._set_stance(stance)
        finally:
            _set_eval_frame(callback)
            self._is_setting = False


def _is_in_compiled_call() -> bool:
    """Whether compiled code is running: hooks added now would be compiled with the rest of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _COMPILED_CALL and frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False
