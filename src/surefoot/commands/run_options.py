"""The options of `surefoot run`: those before the script are surefoot's, those after it the script's.

Not parsed with typer, because nothing may be imported that the script has not imported itself.
"""

from __future__ import annotations

import os

from surefoot.watch.run_script import Target

USAGE = "Use `surefoot run [OPTIONS] SCRIPT [ARGS...]`, or -m MODULE instead of SCRIPT; see `surefoot run --help`."

OPTIONS = {
    "--out": "DIR",
    "--guard": "",
    "--progress": "",
    "--tensorboard": "DIR",
    "--webhook-env": "NAME",
    "--heartbeat": "SECONDS",
    "--eager-looks": "",
}
"""The options except `-m`, each with the value that it takes."""
_WANTED = {"DIR": "a folder", "NAME": "the name of an environment variable", "SECONDS": "a number of seconds"}


class Request:
    """A parsed command line."""

    def __init__(
        self,
        target: Target,
        out: str | None = None,
        guard: bool = False,
        progress: bool = False,
        eager_looks: bool = False,
        tensorboard: str | None = None,
        webhook_env: str | None = None,
        heartbeat: float | None = None,
    ) -> None:
        self.target, self.out, self.guard, self.progress = target, out, guard, progress
        self.eager_looks, self.tensorboard = eager_looks, tensorboard
        self.webhook_env, self.heartbeat = webhook_env, heartbeat


def parse(arguments: list[str]) -> Request | str | None:
    """The request, or a description of what is wrong with it; `None` if help is requested."""
    given: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if OPTIONS.get(name) and (equals or waiting):
            given[name] = value if equals else waiting.pop(0)
        elif OPTIONS.get(word):
            return f"{word} needs {_WANTED[OPTIONS[word]]}: surefoot run {word} {OPTIONS[word]} SCRIPT"
        elif word in OPTIONS:
            given[word] = "yes"
        elif word == "-m":
            if not waiting:
                return "-m needs a module: surefoot run -m MODULE"
            return _request(Target(waiting[0], tuple(waiting[1:]), is_module=True), given)
        elif word in ("-h", "--help"):
            return None
        elif word == "--" and waiting:
            return _request(Target(waiting[0], tuple(waiting[1:])), given)
        elif word.startswith("-") and word != "-":
            return _unknown(name)
        else:
            return _request(Target(word, tuple(waiting)), given)
    return f"no script given. {USAGE}"


def _unknown(option: str) -> str:
    import difflib

    near = difflib.get_close_matches(option, OPTIONS, n=1)
    meant = f"did you mean {near[0]}?" if near else "options of the script come after the script."
    return f"unknown option {option}; {meant} {USAGE}"


def _request(target: Target, given: dict[str, str]) -> Request | str:
    variable = given.get("--webhook-env")
    if variable is not None and not os.environ.get(variable):
        return (
            f"--webhook-env {variable}: the environment variable is not set, or it is empty. It must contain the "
            "URL that alerts are sent to."
        )
    try:
        heartbeat = float(given["--heartbeat"]) if "--heartbeat" in given else None
    except ValueError:
        return f"--heartbeat takes a number of seconds; got {given['--heartbeat']!r}."
    if heartbeat is not None and variable is None:
        return "--heartbeat needs --webhook-env: the environment variable with the address that heartbeats are sent to."
    return Request(
        target,
        given.get("--out"),
        guard="--guard" in given,
        progress="--progress" in given,
        eager_looks="--eager-looks" in given,
        tensorboard=given.get("--tensorboard"),
        webhook_env=variable,
        heartbeat=heartbeat,
    )


def misplaced(target: Target) -> str:
    """A message about options of surefoot that follow the script and are therefore passed to it; empty if none do."""
    given = [word for word in target.arguments if word in OPTIONS or OPTIONS.get(word.partition("=")[0])]
    if not given:
        return ""
    found = list(dict.fromkeys(word.partition("=")[0] for word in given))
    usage = " ".join(f"{name} {OPTIONS[name]}".rstrip() for name in sorted(found, key=list(OPTIONS).index))
    script = f"{'-m ' * target.is_module}{target.name}"
    were = "was" if len(found) == 1 else "were"
    return (
        f"surefoot: {', '.join(found)} after {target.name} {were} passed to the script; "
        f"to use {'it' if len(found) == 1 else 'them'} in surefoot, run: surefoot run {usage} {script} ..."
    )


_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
}


def unobserved_ranks(target: Target) -> str:
    """What to say of a launcher that is run under surefoot: it starts the script in other processes."""
    launcher = _LAUNCHERS.get(target.name if target.is_module else os.path.basename(target.name))
    if launcher is None:
        return ""
    return (
        f"surefoot: the processes that {launcher} starts are not observed; "
        f"to observe each of them, run: {launcher} ... -m surefoot run SCRIPT ..."
    )
