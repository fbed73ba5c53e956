"""Make every probe, and every function that observes, raise in turn; the script must not notice.

    python tests/watch/sabotage.py            prints one line per failure and the counts

torch is imported once and each case is a fork. A case is some names given to `ProbeRunner.safely`, whose observations then
raise whatever they are, or a function of `surefoot.watch` that computes something about the script. A probe that is not
reached because another one of its case has failed gets a case of its own.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2] / "benchmarks")]

import bitwise
import torch

from surefoot.watch import probe_runner

SCRIPT = """
import random, sys, warnings
epochs = int(sys.argv[1])
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0); random.seed(0); np.random.seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8); self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8); self.drop = nn.Dropout(0.1); self.out = nn.Linear(8, 12); self.act = nn.ReLU()
        self.strays = [torch.zeros(2, requires_grad=True)]
    def forward(self, ids):
        x = self.table(ids); mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(x, x, x, attn_mask=mask, is_causal=True)[0]
        return self.out(self.act(self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))))

ids = torch.randint(12, (40, 7)); loader = DataLoader(TensorDataset(ids), batch_size=8, shuffle=True)
net, head = Net(), nn.Linear(12, 3)
optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
saved = None
for epoch in range(epochs):
    net.train()
    for i, (batch,) in enumerate(loader):
        logits = net(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 12), batch[:, 1:].reshape(-1))
        policy = Categorical(logits=head(logits.mean(1))); action = policy.sample()
        extra = -(policy.log_prob(action) * (action.float() - 1)).mean()
        squares = (torch.sigmoid(logits).mean(-1) - 0.5).pow(2).mean() + (logits - 1.0).exp().clamp(max=3).log1p().mean()
        loss = loss + 0.1 * extra + 0.01 * squares
        if epoch == epochs - 2 and i == 2: loss = loss * 1000
        if epoch == epochs - 1 and i == 3: loss = loss * torch.log(-logits.detach().abs().sum() * loss)
        optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0); scaler.step(optimizer); scaler.update()
    schedule.step(); net.eval()
    with torch.no_grad(): print(epoch, loss.item(), F.cross_entropy(net(ids[:8, :-1]).reshape(-1, 12), ids[:8, 1:].reshape(-1)).item())
    order = torch.randperm(40); state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    if epoch == 0: torch.save(state, "state.pt"); state = torch.load("state.pt"); net.load_state_dict(state["net"]); optimizer.load_state_dict(state["optimizer"])
bare = torch.nn.Linear(3, 1); second = torch.optim.SGD(bare.parameters(), lr=float("inf"))
for _ in range(3): second.zero_grad(); bare(torch.ones(2, 3)).pow(2).mean().backward(); second.step(); print(bare.weight.isnan().any().item())
print(torch.rand(1).item(), random.random(), np.random.rand())
net(torch.full((2, 3), 50))
"""

EPOCHS = 3, 8
"""The script is short wherever the short one comes to the probe. Spikes are looked for after some dozen steps."""

INFRASTRUCTURE = {
    "ProbeRunner.safely", "ProbeRunner.switch_off", "ProbeRunner.here", "ProbeRunner.__init__", "Watcher.__init__",
    "FunctionRecorder.__torch_function__", "FunctionRecorder.leave", "FunctionRecorder.is_on_top",
    "FunctionRecorder.is_entered", "FunctionRecorder.__init__", "ModuleHooks.remove", "ModuleHooks._before_call",
    "ModuleHooks._after_call", "ModuleHooks._follows", "ModuleHooks.__init__", "StepRecording.remove_hooks",
    "StepRecording.__init__", "remove_leftover_recorders", "ModelCalls.__init__", "OptimizerUpdates.__init__",
    "CallFacts.__init__", "CallHistory.__init__", "LossCalls.__init__", "LayerCalls.__init__", "NumericCalls.__init__",
    "StepSampler.__init__", "BackwardObserver.__init__", "StepObserver.__init__", "FactsSaver.__init__",
    "EventRecorder.__init__", "Evaluations.__init__", "NonFiniteGradients.__init__",
}  # fmt: skip
"""What the safety itself is made of."""

_OBSERVING = (
    "accumulated_loss", "autograd_graph", "backward_observer", "batch_numbers", "call_facts",
    "call_history", "collected_facts", "crash", "data_origin", "deferred", "evaluation", "extra_backward",
    "function_recorder", "layer_calls", "loss_calls", "loss_graph", "loss_level", "loss_readings", "model_calls",
    "module_hooks", "nonfinite_gradients", "nonfinite_origin", "numeric_calls", "optimizer_order",
    "optimizer_record", "optimizer_updates", "parameter_registry", "probe_runner", "retained_graphs",
    "row_mixing", "sampling_budget", "step_data", "step_observer", "step_recording", "step_rows", "step_sampler",
    "tensor_summary", "user_frames", "watcher",
)  # fmt: skip
MODULES = tuple(import_module(f"surefoot.watch.{name}") for name in _OBSERVING)


def functions():
    """Every function of those modules: the owner, its name there, and what to call it."""
    for module in MODULES:
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                yield module, name, value.__qualname__
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for key, held in vars(value).items():
                    if inspect.isfunction(held) and held.__code__.co_filename == module.__file__:
                        yield value, key, held.__qualname__


def sabotage(owner, name) -> None:
    def raising(*args, **kwargs):
        raise RuntimeError("sabotaged")

    original = getattr(owner, name)
    if not isinstance(owner, type):  # also where it was imported to
        for module in MODULES + tuple(m for n, m in sys.modules.items() if n.startswith("surefoot.watch")):
            if vars(module).get(name) is original:
                setattr(module, name, raising)
    setattr(owner, name, raising)


def sabotage_probes(probes) -> None:
    safely = probe_runner.ProbeRunner.safely

    def raising(*args):
        raise RuntimeError("sabotaged")

    def patched(self, name, observe, *args):
        return safely(self, name, raising if name in probes else observe, *args)

    probe_runner.ProbeRunner.safely = patched


def record_probes(file: Path) -> None:
    safely = probe_runner.ProbeRunner.safely
    seen: list[str] = []

    def patched(self, name, observe, *args):
        if name not in seen:
            seen.append(name)
            file.write_text(json.dumps(seen))
        return safely(self, name, observe, *args)

    probe_runner.ProbeRunner.safely = patched


def run(path: str, epochs: int, folder: Path, watched: bool, prepare=lambda: None):
    child = os.fork()
    if child == 0:
        try:
            prepare()
            bitwise.run_in_child(path, (str(epochs),), watched, folder)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    state = folder / "state.json"
    return (
        (folder / "stdout").read_text(),
        json.loads(state.read_text()) if state.exists() else None,
        (folder / "stderr").read_text(),
    )


TOGETHER = 4
"""So many probes fail in one run."""


def groups(probes) -> list[tuple[str, ...]]:
    """Probes that need a script of the same length. Those that are reached one after the other, of which one may be
    inside of the other, are in different groups."""
    found = []
    for epochs in EPOCHS:
        names = [probe for probe, needed in probes.items() if needed == epochs]
        count = -(-len(names) // TOGETHER)
        found += [tuple(names[start::count]) for start in range(count)]
    return found


def main() -> None:
    torch.set_num_threads(1)
    bitwise.import_watching()
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    failures = cases = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        path = root / "script.py"
        path.write_text(SCRIPT)
        plain, probes = {}, {}
        for epochs in EPOCHS:
            seen = root / f"probes-{epochs}.json"
            plain[epochs] = run(str(path), epochs, root / f"plain-{epochs}", False)
            recorded = run(str(path), epochs, root / f"recorded-{epochs}", True, lambda seen=seen: record_probes(seen))
            assert plain[epochs][:2] == recorded[:2], "watching alone already changes the script"
            assert "stopped watching" not in recorded[2], recorded[2]
            for probe in json.loads(seen.read_text()):
                probes.setdefault(probe, epochs)
        todo = [(f"probe {', '.join(group)}", group, partial(sabotage_probes, group)) for group in groups(probes)]
        todo += [
            (f"function {called}", (), partial(sabotage, owner, name))
            for owner, name, called in functions()
            if called not in INFRASTRUCTURE
        ]
        for number, (title, group, prepare) in enumerate(todo):  # it grows
            if only not in title:
                continue
            epochs = max((probes[probe] for probe in group), default=EPOCHS[-1])
            out, state, errors = run(str(path), epochs, root / str(number), True, prepare)
            told = [line for line in errors.splitlines() if "stopped watching" in line]
            names = [line.partition("stopped watching ")[2].partition(" (")[0] for line in told]
            cases += max(1, len(group) and len(names))
            unreached = [probe for probe in group if probe not in names]
            if len(group) > 1:
                todo += [(f"probe {probe}", (probe,), partial(sabotage_probes, (probe,))) for probe in unreached]
            problems = []
            if (out, state) != plain[epochs][:2]:
                problems.append("the script noticed")
            if len(group) == 1 and unreached:
                problems.append(f"expected a warning about {group[0]}, got {told}")
            if group and not set(names) <= set(group):
                problems.append(f"expected warnings about {group} only, got {told}")
            if len(names) != len(set(names)):
                problems.append(f"a warning came twice: {told}")
            if group and not any("surefoot: " in line for line in errors.splitlines() if line not in told):
                problems.append("no diagnosis at the end")
            failures += bool(problems)
            for problem in problems:
                print(f"FAILED {title}: {problem}; {errors[-400:]}", flush=True)
    print(f"{cases - failures} of {cases} cases went unnoticed by the script ({len(probes)} probes)")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
