"""Random generators that are reachable from a loader: finds them, and reads and sets their states as plain values.

A data set, a sampler or a collate function may own a `torch.Generator`, a `numpy.random.Generator` or `RandomState`, or
a `random.Random`. `find_generators` walks attributes, small containers, closures and the globals of their modules, and
names each one by its path, which is the same in a restarted process. The streams of the process itself
(`surefoot.core.random_state`) are not among them, except in `process_generators`, which a worker process uses.

Not covered: generators inside containers of more than `LARGEST` entries, behind `__slots__`, or created after the
search.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from surefoot.core.device import default_generators

LARGEST = 64
"""A list or dictionary with more entries is data, and is not searched."""

_VISITS, _DEPTH = 2_000, 8
_WORDS = 624
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, Tensor, np.ndarray, np.generic)
Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
Generators: TypeAlias = dict[str, Generator]
"""Generators by their path in the searched object."""
GeneratorStates: TypeAlias = dict[str, list[Any]]
"""Their states as plain values, by the same paths."""
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def process_generators() -> Generators:
    """The process's own streams on the CPU, as generator objects."""
    return {"python": random._inst, "numpy": np.random.mtrand._rand, "torch": torch.default_generator}


def find_generators(root: Any) -> Generators:
    """Every random generator reachable from `root`, by path."""
    found: Generators = {}
    seen: dict[int, Any] = {id(each): each for each in process_generators().values()}  # also keeps temporaries alive
    queue = deque([("", root, 0)])
    while queue and len(seen) < _VISITS:
        path, thing, depth = queue.popleft()
        if isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, _KINDS):
            if not isinstance(thing, random.SystemRandom) and not _on_device_default(thing):
                found[path] = thing
        elif depth < _DEPTH:
            queue.extend((f"{path}.{name}", child, depth + 1) for name, child in _children(thing, seen))
    return found


def _on_device_default(generator: Any) -> bool:
    return any(generator is each for each in default_generators())


def _children(thing: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, (dict, list, tuple)):
        if len(thing) <= LARGEST:
            yield from _entries(thing)
        return
    if isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, MethodType):
        yield from (("self", thing.__self__), ("function", thing.__func__))
    elif isinstance(thing, FunctionType):
        cells = thing.__closure__ or ()
        yield from zip(thing.__code__.co_freevars, map(_cell_content, cells), strict=False)
        yield from _in_globals(thing.__globals__, seen)
    else:
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            # What a loader keeps of its last pass is not one of its settings.
            yield from ((str(name), value) for name, value in list(own.items()) if name != "_iterator")
        yield from _in_globals(getattr(sys.modules.get(type(thing).__module__), "__dict__", {}), seen)


def _entries(thing: Any) -> Iterator[tuple[str, Any]]:
    pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
    yield from ((str(key), value) for key, value in list(pairs))


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _in_globals(names: Mapping[str, Any], seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Generators at the top level of a module, where scripts have theirs; each module is searched once."""
    if id(names) in seen:
        return
    seen[id(names)] = names
    yield from ((f"globals.{name}", value) for name, value in list(names.items()) if isinstance(value, _KINDS))


def read_generator(generator: Generator) -> list[Any]:
    """The state of a generator as plain values; equal exactly if the generators would continue equally."""
    if isinstance(generator, torch.Generator):
        return ["torch", generator.get_state().numpy().tobytes()]
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return ["python", version, np.array(words, dtype=np.uint32).tobytes(), gauss]
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
        gauss = [int(state["has_gauss"]), float(state["gauss"])]
        return ["numpy", *_bits(state), *gauss]
    return ["numpy", *_bits(generator.bit_generator.state), 0, 0.0]


def _bits(state: Any) -> tuple[str, bytes, str]:
    """A bit generator's state: its name, the words of a Mersenne twister, the rest as JSON (it has 128-bit numbers)."""
    rest = {name: value for name, value in state.items() if name not in ("has_gauss", "gauss")}
    words = b""
    if rest["bit_generator"] == "MT19937":
        words = rest["state"]["key"].astype(np.uint32).tobytes()
        rest["state"] = {"pos": int(rest["state"]["pos"])}
    return rest["bit_generator"], words, json.dumps(rest, default=lambda each: each.tolist())


def set_generator(generator: Generator, state: list[Any]) -> None:
    """Set the state of a generator. Raises `ValueError` for a state of another kind of generator."""
    kind = state[0]
    if kind == "torch" and isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state[1]), dtype=torch.uint8))
    elif kind == "python" and isinstance(generator, random.Random):
        generator.setstate((state[1], tuple(np.frombuffer(state[2], dtype=np.uint32).tolist()), state[3]))
    elif kind == "numpy" and isinstance(generator, (np.random.Generator, np.random.RandomState)):
        _set_numpy(generator, *state[1:])
    else:
        raise ValueError(f"a {type(generator).__name__} cannot continue the state of a generator of kind {kind!r}.")


def _set_numpy(generator: Any, name: str, words: bytes, text: str, has_gauss: int, gauss: float) -> None:
    rest = json.loads(text)
    if name == "MT19937":
        keys, position = np.frombuffer(words, dtype=np.uint32), rest["state"]["pos"]
        if len(keys) != _WORDS or not 0 <= position <= _WORDS:  # NumPy would read beyond its words
            raise ValueError("the state of a NumPy generator points outside itself.")
        rest["state"]["key"] = keys.copy()
    state = _with_arrays(rest)
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})


def _with_arrays(state: dict[str, object]) -> dict[str, object]:
    changed = {name: np.array(value, dtype=np.uint64) for name, value in state.items() if isinstance(value, list)}
    nested = {name: _with_arrays(value) for name, value in state.items() if isinstance(value, dict)}
    return {**state, **changed, **nested}


def read_generators(generators: Mapping[str, Generator]) -> GeneratorStates:
    """The states of several generators, by path."""
    return {path: read_generator(each) for path, each in generators.items()}


def set_generators(generators: Mapping[str, Generator], states: GeneratorStates) -> None:
    """Set those generators whose states are known and of the same kind; the others are unchanged."""
    for path, state in states.items():
        if path in generators and state[0] == read_generator(generators[path])[0]:
            set_generator(generators[path], state)
