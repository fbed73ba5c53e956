"""surefoot inside the trainer that you already use, in one line.

    Trainer(model, args, train_dataset=data, callbacks=[sf.trainers.transformers.StabilizerCallback("runs/exp1")])
    L.Trainer(callbacks=[sf.trainers.lightning.StabilizerCallback("runs/exp1")])
    model, optimizer, loader = sf.trainers.accelerate.prepare(accelerator, model, optimizer, loader, log="runs/exp1")
    with sf.trainers.ray.GuardedWorker(model, optimizer, "surefoot") as guard: ...

Each module imports its framework, and is imported when it is first used. What they share is in `guarded_training.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

FRAMEWORKS = ("accelerate", "ignite", "lightning", "ray", "transformers")


def __getattr__(name: str) -> Any:
    if name in FRAMEWORKS:
        try:
            return import_module(f"surefoot.trainers.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "surefoot").startswith("surefoot"):
                raise
            # Not an ImportError: `hasattr` and `inspect.getmembers` must work where a framework is not installed.
            raise AttributeError(
                f"sf.trainers.{name} needs {error.name}. In the checkout of surefoot, run `pip install -e '.[{name}]'`."
            ) from error
    raise AttributeError(f"module 'surefoot.trainers' has no attribute {name!r}; it has {', '.join(FRAMEWORKS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *FRAMEWORKS})
