"""Arguments for the exported clippers, detectors and other parts that cannot be made without any.

`tests/guard/test_contract.py`, `tests/act/test_clip.py` and `tests/gpu/test_guarded_step_on_cuda.py` make every
exported part with them.
"""

import inspect

import surefoot as sf

ARGUMENTS = {
    "ClipByNorm": (1.0,),
    "ClipByValue": (1.0,),
    "all_of": (sf.Explosion(), sf.Spike()),
    "any_of": (sf.NonFinite(), sf.Explosion()),
    "after_warmup": (sf.Explosion(), 3),
    "sustained": (sf.Spike(), 2),
}
"""The positional arguments, by the exported name."""


def exported_from(module):
    """The exported names that a module defines."""
    return [name for name in sf.__all__ if getattr(getattr(sf, name), "__module__", "") == module.__name__]


def made(name):
    """An exported part. A part that needs arguments and has no entry fails with a message that names this file."""
    make = getattr(sf, name)
    parameters = inspect.signature(make).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    missing = bool(needed) and name not in ARGUMENTS
    assert not missing, f"{name} needs {needed}: add it to ARGUMENTS in tests/part_arguments.py, so that it is tested."
    return make(*ARGUMENTS.get(name, ()))
