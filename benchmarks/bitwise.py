"""Do no harm, checked: every script of the zoo and a list of odd ones, with and without `surefoot run`.

Compared bit for bit: what the script printed, how it ended, and at its end every parameter, buffer and optimizer state
of every module and optimizer it ever made, and the Python, NumPy and torch random streams.

    python benchmarks/bitwise.py [--only PART] [--seed 100] [--odd | --zoo]

torch is imported once; each run is a fork of that process, so that hundreds of scripts take minutes. (The start of a
run, with torch not yet imported, is the business of tests/launch.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch._dynamo
from odd_scripts import ODD, PRELUDE
from torch import Tensor, nn

TIMEOUT_S = 240


def digest_of(value) -> str:
    """A hash of nested state; tensors by their bytes."""
    made = hashlib.sha256()
    if isinstance(value, Tensor):
        if value.is_meta or isinstance(value, nn.parameter.UninitializedParameter):
            return f"empty{tuple(value.shape) if value.is_meta else ''}"
        value = value.detach()
        if value.layout is not torch.strided:
            value = value.coalesce().to_dense() if value.layout is torch.sparse_coo else value.values()
        value = value.as_subclass(Tensor).cpu().contiguous()
        made.update(f"{value.dtype}{tuple(value.shape)}".encode())
        made.update(torch.view_as_real(value).numpy().tobytes() if value.is_complex() else bytes_of(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            made.update(f"{key}={digest_of(item)};".encode())
    elif isinstance(value, (list, tuple)):
        for item in value:
            made.update(digest_of(item).encode())
    else:
        made.update(repr(value).encode() if not callable(value) else b"f")
    return made.hexdigest()[:16]


def bytes_of(value: Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


class Census:
    """Every module and optimizer a script makes, in the order it makes them."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for kind, members in ((nn.Module, self.modules), (torch.optim.Optimizer, self.optimizers)):
            self._count(kind, members)

    @staticmethod
    def _count(kind, members) -> None:
        original = kind.__init__

        def counted(self, *args, **kwargs):
            members.append(self)
            return original(self, *args, **kwargs)

        kind.__init__ = counted

    def state(self) -> dict[str, object]:
        modules, optimizers = list(self.modules), list(self.optimizers)
        found: dict[str, object] = {"modules": len(modules), "optimizers": len(optimizers)}
        with torch._C.DisableTorchFunction():
            for number, module in enumerate(modules):
                held = {**module.__dict__.get("_parameters", {}), **module.__dict__.get("_buffers", {})}
                for name, tensor in held.items():
                    if tensor is not None:
                        found[f"{number} {type(module).__name__}.{name}"] = digest_of(tensor)
                        found[f"{number} {type(module).__name__}.{name}.grad"] = digest_of(tensor.grad)
            for number, optimizer in enumerate(optimizers):
                groups = getattr(optimizer, "param_groups", [])
                found[f"groups {number}"] = [digest_of(group) for group in groups]
                found[f"state {number}"] = [
                    digest_of(optimizer.state.get(tensor, {})) for group in groups for tensor in group["params"]
                ]
        found["torch stream"] = digest_of(torch.get_rng_state())
        found["python stream"] = digest_of(random.getstate())
        found["numpy stream"] = digest_of(np.random.get_state())
        return found


def run_in_child(path: str, arguments: tuple[str, ...], watched: bool, folder: Path) -> None:
    """In a forked child: become the script."""
    from surefoot.launch import command, execute, voice

    folder.mkdir(parents=True, exist_ok=True)
    out = os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.chdir(folder)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    voice._stream = sys.stderr
    random.seed(20)  # a fork draws a new seed of its own
    census = Census()
    target = execute.Target(path, arguments)
    session = command.Session(command.Request(target, str(folder / "run")))
    leave = os._exit
    try:
        if watched:
            session.run()
        else:
            execute.run(target, session.ending)
    except SystemExit:
        pass
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    os._exit = leave
    code = session.ending.code
    state = census.state()
    if watched:
        session._close()
    sys.stdout.flush()
    (folder / "state.json").write_text(json.dumps({"code": code, **state}))


def run(path: str, arguments: tuple[str, ...], watched: bool, folder: Path) -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(TIMEOUT_S)
        code = 1
        try:
            run_in_child(path, arguments, watched, folder)
            code = 0
        finally:
            os._exit(code)
    os.waitpid(child, 0)


def differences(path: str, arguments: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
    """What differs between the two runs, and which probes failed in the watched one."""
    with tempfile.TemporaryDirectory() as scratch:
        # Both runs in a folder of the same name: scripts print paths.
        plain, watched = Path(scratch) / "a" / "x", Path(scratch) / "b" / "x"
        run(path, arguments, False, plain)
        run(path, arguments, True, watched)
        found = []
        if not (plain / "state.json").exists() or not (watched / "state.json").exists():
            missing = [folder.parent.name for folder in (plain, watched) if not (folder / "state.json").exists()]
            return [f"no end was reached in {missing}: {(watched / 'stderr').read_text()[-300:]}"], {}
        if (plain / "stdout").read_bytes() != (watched / "stdout").read_bytes():
            found.append("stdout: " + first_difference(plain / "stdout", watched / "stdout"))
        left, right = (json.loads((folder / "state.json").read_text()) for folder in (plain, watched))
        found.extend(key for key in {**left, **right} if left.get(key) != right.get(key))
        problems: dict[str, str] = {}
        if (watched / "run" / "facts.json").exists():
            problems = json.loads((watched / "run" / "facts.json").read_text()).get("problems", {})
        if not (watched / "run" / "findings.json").exists():
            problems["diagnosis"] = (watched / "stderr").read_text()[-300:]
        return found, problems


def first_difference(left: Path, right: Path) -> str:
    one, other = left.read_text().splitlines(), right.read_text().splitlines()
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"line {number + 1}: {a[:160]!r} against {b[:160]!r}"
    return f"{len(one)} lines against {len(other)}"


def scripts(only: str, odd: bool, zoo: bool, seed: int, scratch: Path):
    if odd:
        for name, text in ODD.items():
            if only in f"odd/{name}":
                path = scratch / f"{name}.py"
                path.write_text(PRELUDE + text + "\n")
                yield f"odd/{name}", str(path), ()
    if zoo:
        from surefoot.zoo import specimens

        for specimen in specimens(only=only):
            yield specimen.name, str(specimen.path), (str(seed),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only scripts with this in their name")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--odd", action="store_true", help="only the odd scripts")
    parser.add_argument("--zoo", action="store_true", help="only the zoo")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    equal = total = unwatched = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        every = not asked.odd and not asked.zoo
        for name, path, arguments in scripts(
            asked.only, asked.odd or every, asked.zoo or every, asked.seed, Path(scratch)
        ):
            found, problems = differences(path, arguments)
            total += 1
            equal += not found
            unwatched += bool(problems)
            for difference in found[:6]:
                print(f"DIFFERS {name}: {difference}", flush=True)
            for probe, why in problems.items():
                print(f"UNWATCHED {name}: {probe}: {why}", flush=True)
    print(f"bitwise equal: {equal} of {total} scripts; probes failed in {unwatched}; {time.monotonic() - began:.0f} s")
    sys.exit(equal != total)


if __name__ == "__main__":
    main()
