"""A deep look at one step: every model call, every loss, every gradient and every update, with names.

Global module hooks follow the calls, a tape the operations, the autograd graph says what the loss depends on. All of it
is taken off again when the step is over; other steps are only counted.
"""

from __future__ import annotations

import math
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from surefoot.launch import graph
from surefoot.launch.calm import Unnoticed, is_calm, listeners
from surefoot.launch.describe import describe, fingerprints, sampled
from surefoot.launch.notes import VIEWS, Notes
from surefoot.launch.sites import site
from surefoot.launch.tape import BREAKS, Tape, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from surefoot.launch.book import Book, Parameter
    from surefoot.launch.tape import Entry

MOST_PASSES = 64
"""A step with more model calls than this is not one; the look then only counts."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCHNORM = nn.modules.batchnorm._BatchNorm
_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class Look:
    """Everything seen between two steps."""

    def __init__(
        self, step: int, book: Book, safely: Callable[..., Any], use_tape: bool, thorough: bool, hooked: bool = True
    ) -> None:
        self._hooked = hooked
        self._used: set[int] = set()
        self._reached: set[int] = set()
        self._stepped: set[int] = set()
        self.step = step
        self.thorough = thorough
        self.passes: list[dict[str, Any]] = []
        self.roots: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.origins: dict[str, list[tuple[str, str, str]]] = {}
        """For each kind of autograd node: the site, module and call of those on the tape, in order."""
        self._book, self._safely = book, safely
        self.notes = Notes(book.id_of)
        self.tape: Tape | None = Tape(self._take_note, safely) if use_tape else None
        self.notes.tape = self.tape
        self._handles: list[Any] = []
        self._stack: list[nn.Module] = []
        self._paths: dict[int, str] = {}
        self._entered = False
        self._before: dict[int, Tensor] = {}
        self._outputs: list[tuple[dict[str, Any], Any, Any]] = []
        self._hidden_tape = 0
        self._thread = get_ident()
        self._several = len({number for held in book.parameters for number in held.optimizers}) > 1
        """Several optimizers: perhaps models that judge each other, whose samples are compared."""

    # Beginning and end

    def begin(self) -> None:
        """Put the hooks on."""
        if not self._hooked:
            return
        self._handles = [
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True),
        ]
        if self.tape is not None:
            self._entered = True
            self.tape.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Take everything off again."""
        self.take_off()
        for number in self._used:
            self._book.parameters[number].used += 1
            if number not in self._reached:
                self._safely("parameters", self._sample, self._book.parameters[number])
        for number in self._reached:
            self._book.parameters[number].in_graph += 1
        for number in self._stepped:
            self._book.parameters[number].looked += 1
        self._forget()
        self._before = {}
        self._outputs = []

    def take_off(self) -> None:
        """Hooks and tape off; what was seen stays."""
        for handle in self._handles:
            handle.remove()
            if isinstance(handle, RemovableHandle):  # torch forgets one of its own tables
                _global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        if self._entered and self.tape is not None:
            self._entered = False
            self.tape.paused += 1
            self.tape.leave()

    def _forget(self) -> None:
        """Let go of the graph; keep where in the user's code each kind of node came from."""
        if self.tape is not None:
            products = {i for e in self.tape.entries if e.name in ("matmul", "einsum", "bmm", "mul") for i in e.inputs}
            for note in self.notes.softmaxes:
                note.setdefault(
                    "attends",
                    note["op"] == "scaled_dot_product_attention" or bool(products & self._passed_on(note["index"])),
                )
            for entry in self.tape.entries:
                if entry.node is not None:
                    self.origins.setdefault(graph.op(entry.node), []).append((entry.site, entry.module, entry.name))
                entry.node = None
                entry.note = {}
        self.notes.targets = {}

    def _passed_on(self, index: int) -> set[int]:
        """An entry and those that only reshape, drop or copy its result."""
        assert self.tape is not None
        found = {index}
        for entry in self.tape.entries[index + 1 : index + 12]:
            if (entry.name in VIEWS or entry.name == "dropout") and found & set(entry.inputs):
                found.add(entry.index)
        return found

    def as_facts(self) -> dict[str, Any]:
        """For the run folder."""
        facts: dict[str, Any] = {"step": self.step, "passes": self.passes, "roots": self.roots, "steps": self.steps}
        facts["notes"] = self.notes.as_facts()
        if self.tape is not None:
            facts["breaks"] = self._breaks()
            facts["operations"] = len(self.tape.entries)
        return facts

    # Calls of modules

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if self._watches():
            self._safely("model calls", self._enter_call, module, args)

    def _after_call(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """`rest` is the keyword arguments and the result; after an exception, torch leaves the former out."""
        if self._watches():
            kwargs, out = rest if len(rest) == 2 else ({}, None)
            self._safely("model calls", self._leave_call, module, args, kwargs, out)

    def _watches(self) -> bool:
        return get_ident() == self._thread and is_calm()

    def _enter_call(self, module: nn.Module, args: Any) -> None:
        if (
            self._entered
            and self.tape is not None
            and isinstance(module, _FAST_PATHS)
            and not self._hidden_tape
            and not _may_need_gradients(module, args)
            and self.tape.is_entered()
        ):
            # These modules take another (slower, slightly different) path while a mode is on.
            self.tape.leave()
            self._hidden_tape = id(module)
        self._stack.append(module)
        if self.tape is not None:
            if len(self._stack) == 1:
                self._safely("names", self._name_parts, module)
            self.tape.module = self._path(module)

    def _leave_call(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # a call below was left by an exception
        if self._hidden_tape == id(module) and self.tape is not None:
            self._hidden_tape = 0
            if self._entered:
                self.tape.__enter__()  # type: ignore[no-untyped-call]
        if self.tape is not None:
            self.tape.module = self._path(self._stack[-1]) if self._stack else ""
        if not self._stack and len(self.passes) < MOST_PASSES:
            self._safely("model calls", self._note_pass, module, args, kwargs, out)

    def note_compiled(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A call of a compiled model."""
        if len(self.passes) < MOST_PASSES:
            self._note_pass(getattr(module, "_orig_mod", module), args, kwargs, out)

    def _name_parts(self, root: nn.Module) -> None:
        if id(root) not in self._paths and any(True for _ in root.parameters()):
            prefix = self._book.add_model(root)
            for path, part in root.named_modules():
                self._paths[id(part)] = f"{prefix}.{path}" if path else prefix

    def _path(self, module: nn.Module) -> str:
        return self._paths.get(id(module)) or type(module).__name__

    def _note_pass(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if not any(True for _ in module.parameters()):
            return
        grad_mode = torch.is_grad_enabled()
        with self.quietly():
            name = self._book.add_model(module)
            inputs = [tensor for tensor in [*tensors_in(args), *tensors_in(kwargs)] if tensor.dim()][:4]
            outputs = list(tensors_in(out))[:4]
            note: dict[str, Any] = {
                "model": name,
                "step": self.step,
                "grad": grad_mode and any(tensor.requires_grad for tensor in outputs),
                "grad_mode": grad_mode,
                "training": module.training,
                "site": site(4),
                "inputs": [describe(tensor) for tensor in inputs],
                "outputs": [describe(tensor) for tensor in outputs],
                "autocast": str(torch.get_autocast_dtype(outputs[0].device.type)).removeprefix("torch.")
                if outputs and torch.is_autocast_enabled(outputs[0].device.type)
                else None,
                "index": len(self.tape.entries) if self.tape is not None else None,
            }
            note |= mode_facts(module)
            if inputs and inputs[0].dim() and inputs[0].shape[0] and inputs[0].numel() <= 1 << 22:
                note["rows"] = fingerprints(inputs[0], 256)
                note["features"] = feature_scales(inputs[0])
            if outputs and outputs[0].dim() > 1 and len(outputs[0]) > 1 and outputs[0].is_floating_point():
                note["diversity"] = float(outputs[0].detach().float().std(0).mean())
            if self._several and grad_mode:
                note["samples"] = [_few(tensor) for tensor in (inputs[:1] + outputs[:1])]
            for tensor in module.parameters():
                record = self._book.get(tensor)
                if record is not None and grad_mode:
                    record.requires_grad = tensor.requires_grad
            self.passes.append(note)
            if grad_mode:
                # The outputs are held to the end of the step where their dependence on the inputs is asked for.
                held = outputs if self.thorough else []
                self._outputs.append((note, inputs, held))

    # Operations

    def quietly(self) -> Any:
        """A context in which neither autograd nor the tape notices what we compute."""
        return Unnoticed()

    def _take_note(self, entry: Any, args: Any, kwargs: Any, out: Any) -> None:
        for tensor in (*tensors_in(args), *tensors_in(kwargs)):
            if tensor.is_leaf and tensor.requires_grad and (number := self._book.id_of(tensor)) is not None:
                self._used.add(number)
                entry.parameters.append(number)
        if out is not None and isinstance(out, Tensor) and out.dim() == 0 and out.requires_grad:
            entry.note["scalar"] = out
        self._safely("operations", self.notes.take, entry, args, kwargs, out)

    def _breaks(self) -> list[dict[str, Any]]:
        """Where a value that gradients should flow through was cut off, and whether a loss was made from it."""
        assert self.tape is not None
        found = []
        ends = {root["entry"] for root in self.roots if root.get("entry") is not None}
        reached: set[int] = set()
        for end in ends:
            reached |= {entry.index for entry in self.tape.history(end, 5000)}
        for entry in self.tape.entries:
            cut = entry.name in BREAKS and any(entry.grads) and not entry.out_grad
            dark = not entry.grad_enabled and entry.index in reached and any(entry.grads)
            if cut or dark:
                found.append(
                    {
                        "op": "no_grad" if dark and not cut else entry.name,
                        "site": entry.site,
                        "module": entry.module,
                        "reaches_loss": entry.index in reached,
                        "parameters": sorted(self._upstream(entry))[:200],
                    }
                )
        return found[:200]

    def _upstream(self, entry: Entry) -> set[int]:
        """The parameters that a value was computed from."""
        assert self.tape is not None
        return {number for past in self.tape.history(entry.index, 2000) for number in past.parameters}

    # Backward and step

    def before_backward(self, root: Tensor, facts: dict[str, Any]) -> None:
        """Read the graph under the tensor that `backward` is called on."""
        with self.quietly():
            below = list(graph.nodes(root.grad_fn))
            facts["nodes"] = len(below)
            facts["operations"] = _chain(root.grad_fn)
            found = [variable for node in below if (variable := graph.leaf(node)) is not None]
            facts["custom"] = sorted({graph.op(node) for node in below if hasattr(type(node), "_forward_cls")})[:10]
            known, strange = [], []
            for variable in found:
                record = self._book.get(variable)
                if record is None:
                    strange.append({"shape": list(variable.shape), "parameter": isinstance(variable, nn.Parameter)})
                    record = self._book.add(variable)
                self._reached.add(record.id)
                if not record.optimizers:
                    self._sample(record)
                known.append(record.id)
            facts["parameters"] = sorted(known)
            facts["strange"] = strange[:20]
            entry = self.tape.maker(root) if self.tape is not None else None
            facts["entry"] = entry
            if entry is not None and self.tape is not None:
                facts["made_from"] = self._made_from(entry)
                facts["sign"] = self._sign(entry)
                facts["factor"] = self._factor(entry)
            facts["pairs"] = self._pair_rows(facts)
            self.roots.append(facts)
            self._watch_backward(below, facts)
        if self.thorough and not facts["custom"] and not listeners.gradients and not listeners.saved:
            self._safely("gradient of terms", self._terms, root, facts)
            self._safely("causality", self._causality, facts)

    def _sample(self, record: Parameter) -> None:
        """Whether a parameter that no optimizer should have changed did change since the last look."""
        tensor = record.tensor()
        if tensor is None:
            return
        sample = _thin(tensor)
        if record.sample is not None and record.sample.shape == sample.shape:
            record.moved_alone += not torch.equal(record.sample, sample)
        record.sample = sample.clone()

    def _made_from(self, entry: int) -> list[dict[str, Any]]:
        assert self.tape is not None
        return [
            {"op": e.name, "site": e.site, "index": e.index, "shape": e.out_shape}
            for e in list(self.tape.history(entry, 24))
        ]

    def _sign(self, entry: int) -> dict[str, Any] | None:
        """Follow the loss back to the loss function it came from, counting changes of sign and constant factors."""
        assert self.tape is not None
        from surefoot.launch.notes import LOSSES

        factor: float | None = 1.0
        index = entry
        for _ in range(12):
            e = self.tape.entries[index]
            if e.name in LOSSES:
                return {"function": e.name, "site": e.site, "factor": factor, "index": e.index}
            if e.name == "neg":
                factor = -factor if factor is not None else None
            elif e.name in ("mul", "div") and e.note.get("constant") is not None and factor is not None:
                factor *= float(e.note["constant"])
            elif e.name == "rsub":
                factor = -factor if factor is not None else None
            elif e.name not in ("mean", "sum", "add", "sub", "mul", "div", *VIEWS):
                return None
            ahead = [i for i in e.inputs if self.tape.entries[i].out_grad]
            if len(ahead) != 1:
                return None
            index = ahead[0]
        return None

    def _factor(self, entry: int) -> float:
        """What the loss was multiplied by, in plain numbers, right before backward."""
        assert self.tape is not None
        factor = 1.0
        for _ in range(8):
            e = self.tape.entries[entry]
            if e.note.get("constant") is not None:
                factor *= float(e.note["constant"])
            elif e.name == "neg":
                factor = -factor
            elif e.name not in VIEWS:
                break
            ahead = [i for i in e.inputs if self.tape.entries[i].out_grad]
            if len(ahead) != 1:
                break
            entry = ahead[0]
        return factor

    def _pair_rows(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """A sample of inputs with their labels, if a model call and a loss of this step fit together."""
        if not self._outputs or not self.notes.losses or len(self._outputs) > 1:
            return None
        _, inputs, _ = self._outputs[-1]
        loss = self.notes.losses[-1]
        if self.tape is None or not inputs or loss.get("op") not in _PAIRED:
            return None
        target = self.notes.targets.get(loss["index"])
        features = inputs[0]
        if target is None or not len(features) or target.numel() != len(features) or features.dim() < 2:
            return None
        flat = features.detach()[:64].reshape(len(features[:64]), -1)
        if not flat.is_floating_point():
            flat = _bags(flat)
        if flat.shape[1] > 64:
            flat = flat[:, :: math.ceil(flat.shape[1] / 64)]
        rows = [[round(v, 5) for v in row] for row in flat.float().cpu().nan_to_num().tolist()]
        return {"x": rows, "y": target.detach().reshape(-1)[:64].tolist()}

    def _watch_backward(self, below: list[Any], facts: dict[str, Any]) -> None:
        """Let each node say whether it received, and whether it made, something that is not finite."""
        if len(below) > 4000:
            return
        seen: list[tuple[Any, Any, Any]] = []
        sites = {}
        if self.tape is not None:
            sites = {e.node: e for e in self.tape.entries if e.node is not None}

        def hook_for(node: Any) -> Callable[[Any, Any], None]:
            def hook(made: Any, given: Any) -> None:
                if is_calm():
                    self._safely("backward", note, node, given, made)

            return hook

        def note(node: Any, given: Any, made: Any) -> None:
            seen.append((node, _sums(given), _sums(made)))

        self._handles.extend(node.register_hook(hook_for(node)) for node in below)
        facts["_backward"] = (seen, sites)

    def after_backward(self) -> None:
        """Find the first node of the last backward that turned finite gradients into something else."""
        if not self.roots or "_backward" not in self.roots[-1]:
            return
        facts = self.roots[-1]
        seen, sites = facts.pop("_backward")
        with self.quietly():
            for node, given, made in seen:
                if _all_finite(given) and not _all_finite(made):
                    entry = sites.get(node)
                    facts["backward_nonfinite"] = {
                        "op": graph.op(node),
                        "call": entry.name if entry is not None else None,
                        "site": entry.site if entry is not None else "",
                        "module": entry.module if entry is not None else "",
                    }
                    return

    def _terms(self, root: Tensor, facts: dict[str, Any]) -> None:
        """How much of the gradient each term of a summed loss brings."""
        if self.tape is None or facts.get("entry") is None or facts["nodes"] > 3000:
            return
        terms = _summands(self.tape, facts["entry"])
        if not 2 <= len(terms) <= 6:
            return
        targets = [
            tensor
            for number in facts["parameters"]
            if (tensor := self._book.parameters[number].tensor()) is not None and tensor.dim() > 1
        ]
        if not targets:
            return
        found = []
        for entry, tensor in terms:
            with self.quiet_tape():
                grads = torch.autograd.grad(tensor, targets, retain_graph=True, allow_unused=True)
            with self.quietly():
                norm = math.sqrt(sum(float(g.float().pow(2).sum()) for g in grads if g is not None))
                origin = next((e for e in self.tape.history(entry.index, 40) if e.name in _LOSS_NAMES), None)
                found.append(
                    {
                        "site": entry.site,
                        "op": entry.name,
                        "value": float(tensor),
                        "norm": norm,
                        "loss": origin.name if origin else None,
                        "loss_site": origin.site if origin else None,
                        "loss_index": origin.index if origin else None,
                        "reach": sum(g is not None for g in grads),
                    }
                )
        facts["terms"] = found

    def quiet_tape(self) -> Any:
        """The tape off, autograd as it is."""
        return Unnoticed(grad=True)

    def _causality(self, facts: dict[str, Any]) -> None:
        """Whether an output of a next-token model depends on inputs that come after it."""
        if self.tape is None or not self._outputs:
            return
        loss = next((n for n in reversed(self.notes.losses) if n["op"] == "cross_entropy" and n["grad"]), None)
        if loss is None:
            return
        target = self.notes.targets.get(loss["index"])
        if target is None:
            return
        for note, _, outputs in self._outputs:
            out = next((tensor for tensor in outputs if tensor.requires_grad and tensor.dim() == 3), None)
            if out is None:
                continue
            for entry in self.tape.entries:
                if entry.name != "embedding" or entry.node is None:
                    continue
                ids = entry.note.get("ids")
                if ids is None or ids.dim() != 2 or ids.shape[1] < 4 or not _is_next_token(ids, target):
                    continue
                facts["causality"] = self._leak(out, ids, entry) | {"model": note["model"], "site": loss["site"]}
                return

    def _leak(self, out: Tensor, ids: Tensor, entry: Any) -> dict[str, Any]:
        rows, length = ids.shape
        places = {1: (rows, length), 2: (rows, None, length), 0: (length, rows)}
        time = next(
            (dim for dim, sizes in places.items()
             if all(size in (None, out.shape[i]) for i, size in enumerate(sizes))), None
        )  # fmt: skip
        if time is None:
            return {"applies": False}
        cut = ids.shape[1] // 2
        caught: list[Tensor] = []
        handle = entry.node.register_prehook(lambda grads: caught.append(grads[0].detach()))
        table = next(
            variable for variable in (graph.leaf(n) for n, _ in entry.node.next_functions) if variable is not None
        )
        with self.quiet_tape(), torch.enable_grad():
            early = out.narrow(time, 0, cut)
            pattern = torch.cos(torch.arange(early.numel(), device=out.device, dtype=torch.float32)).reshape(
                early.shape
            )
            torch.autograd.grad((early.float() * pattern).sum(), [table], retain_graph=True, allow_unused=True)
        handle.remove()
        if not caught:
            return {"applies": False}
        with self.quietly():
            flow = caught[0].float().abs().sum(-1)
            if flow.dim() != 2:
                return {"applies": False}
            flow = flow if flow.shape[1] == ids.shape[1] else flow.t()
            return {
                "applies": True,
                "from_past": float(flow[:, :cut].mean()),
                "from_future": float(flow[:, cut:].mean()),
                "positions": ids.shape[1],
            }

    def before_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Gradients as the optimizer will see them, and a sample of each parameter to compare with."""
        rows = []
        with self.quietly():
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    record = self._book.add(tensor)
                    record.optimizers.add(number)
                    self._stepped.add(record.id)
                    if not record.changed + record.unchanged:
                        self._book.see_again(record, tensor)
                    row: dict[str, Any] = {"id": record.id}
                    if tensor.grad is not None and tensor.grad.layout is torch.strided:
                        grad = sampled(tensor.grad)
                        values = grad.float()
                        norm = float(values.norm()) * math.sqrt(tensor.numel() / max(1, values.numel()))
                        row |= {"grad": norm, "zeros": float((grad == 0).float().mean()) if grad.numel() else 0.0}
                        row["nonfinite"] = int((~torch.isfinite(values)).sum())
                        record.with_grad += 1
                        record.zero_grad += norm == 0.0
                        row["largest"] = float(values.abs().max()) if values.numel() else 0.0
                    elif tensor.grad is not None:
                        record.with_grad += 1
                        row["grad"] = float(tensor.grad.coalesce().values().float().norm())
                    self._before[record.id] = _thin(tensor).clone()
                    row["weight"] = float(_thin(tensor).float().norm())
                    state = optimizer.state.get(tensor, {})
                    second = next((state[k] for k in ("exp_avg_sq", "square_avg", "sum") if k in state), None)
                    if isinstance(second, Tensor) and second.numel():
                        steps = float(state.get("step", 1)) or 1.0
                        scale = 1 - float(group["betas"][1]) ** steps if "betas" in group else 1.0
                        row["root_second_moment"] = float(_thin(second).float().sqrt().median()) / math.sqrt(scale or 1)
                        row["second_moment"] = float(_thin(second).float().mean().sqrt())
                        row["age"] = steps
                        row["moment_norm"] = (
                            float(_thin(state["exp_avg"]).float().norm()) if "exp_avg" in state else None
                        )
                    rows.append(row)
        self.steps.append(
            {"optimizer": number, "rows": rows, "lr": [float(g["lr"]) for g in optimizer.param_groups if "lr" in g]}
        )

    def after_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """What the step did to each parameter."""
        held = next((step for step in reversed(self.steps) if step["optimizer"] == number), None)
        if held is None:
            return
        with self.quietly():
            for row in held["rows"]:
                record = self._book.parameters[row["id"]]
                tensor, old = record.tensor(), self._before.pop(record.id, None)
                if tensor is None or old is None:
                    continue
                new = _thin(tensor)
                delta = (new - old).float()
                norm = float(old.float().norm())
                row["update"] = float(delta.norm())
                row["ratio"] = row["update"] / norm if norm else None
                row["stuck"] = float((new == old).float().mean()) if old.numel() else 1.0
                if row["update"] == 0:
                    record.unchanged += 1
                else:
                    record.changed += 1
                    record.trained_by.add(number)
                record.last = weight_summary(tensor)


def weight_summary(tensor: Tensor) -> dict[str, Any]:
    """The scale of a weight now, and whether its rows are still all the same."""
    from surefoot.launch.book import weight_facts

    return weight_facts(tensor)


def mode_facts(module: nn.Module) -> dict[str, Any]:
    """Which parts behave differently in training, and in which mode they are."""
    dropouts = [part for part in module.modules() if isinstance(part, _DROPOUT) and part.p > 0]
    others = [
        part for part in module.modules() if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)) and part.dropout
    ]
    norms = [part for part in module.modules() if isinstance(part, _BATCHNORM) and part.track_running_stats]
    return {
        "dropouts": len(dropouts) + len(others),
        "dropouts_on": sum(part.training for part in [*dropouts, *others]),
        "batchnorms": len(norms),
        "batchnorms_on": sum(part.training for part in norms),
        "batchnorms_frozen": sum(not any(p.requires_grad for p in part.parameters()) for part in norms if part.affine),
    }


def feature_scales(tensor: Tensor) -> dict[str, Any] | None:
    """Mean and spread of each feature of a batch, up to 64 of them."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or len(tensor) < 2:
        return None
    rows = tensor.detach().reshape(len(tensor), -1).float()
    if rows.shape[1] > 64:
        rows = rows[:, :: math.ceil(rows.shape[1] / 64)]
    return {
        "count": len(rows),
        "mean": [round(v, 6) for v in rows.mean(0).nan_to_num().tolist()],
        "std": [round(v, 6) for v in rows.std(0, correction=0).nan_to_num().tolist()],
    }


def _may_need_gradients(module: nn.Module, args: Any) -> bool:
    """Whether a module that has a fast path is kept from it by autograd, or by being in training."""
    if module.training:
        return True
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in [*tensors_in(args), *module.parameters()])


_LOSS_NAMES = {
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "cosine_embedding_loss", "triplet_margin_loss",
}  # fmt: skip


_PAIRED = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"}


def _bags(ids: Tensor) -> Tensor:
    """How often each token id, folded to 64 kinds, occurs in each row."""
    folded = ids.long() % 64
    return torch.zeros(len(ids), 64, device=ids.device).scatter_add_(1, folded, torch.ones_like(folded).float())


def _few(tensor: Tensor) -> list[list[float]] | None:
    """A few rows of a batch, thinned to a few numbers each."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel():
        return None
    rows = tensor.detach()[:32].reshape(len(tensor[:32]), -1)
    rows = rows[:, :: math.ceil(rows.shape[1] / 16)]
    return [[round(v, 4) for v in row] for row in rows.float().nan_to_num().tolist()]


def _thin(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1) if tensor.layout is torch.strided else tensor.detach().to_dense().reshape(-1)
    return flat[:: math.ceil(flat.numel() / 65_536)] if flat.numel() > 65_536 else flat


def _sums(tensors: Any) -> list[Tensor]:
    return [t.detach().float().sum() for t in tensors or () if isinstance(t, Tensor) and t.is_floating_point()]


def _all_finite(sums: list[Tensor]) -> bool:
    return all(math.isfinite(float(value)) for value in sums)


def _chain(node: Any) -> list[str]:
    """The operations right under a root, while there is only one way down."""
    names = []
    for _ in range(12):
        if node is None:
            break
        names.append(graph.op(node))
        below = [n for n, _ in node.next_functions if n is not None]
        if len(below) != 1:
            break
        node = below[0]
    return names


def _summands(tape: Tape, index: int) -> list[tuple[Any, Tensor]]:
    """The scalar tensors a loss is the sum of."""
    entry = tape.entries[index]
    if entry.name in ("add", "sub") or (entry.name in VIEWS and len(entry.inputs) == 1):
        parts = [i for i in entry.inputs if tape.entries[i].out_grad and tape.entries[i].out_shape == []]
        if entry.name in VIEWS or len(parts) >= 1:
            found: list[tuple[Any, Tensor]] = []
            for i in parts:
                found.extend(_summands(tape, i))
            return found
    scalar = entry.note.get("scalar")
    return [(entry, scalar)] if isinstance(scalar, Tensor) else []


def _is_next_token(ids: Tensor, target: Tensor) -> bool:
    """Whether the targets are the inputs, one later."""
    if target.is_floating_point() or target.numel() not in (ids.numel(), ids[:, 1:].numel()):
        return False
    if target.numel() == ids[:, 1:].numel():
        return bool((target.reshape(-1) == ids[:, 1:].reshape(-1)).float().mean() > 0.99)
    goals = target.reshape(ids.shape)
    same = (goals[:, :-1] == ids[:, 1:]).float().mean()
    return bool(same > 0.95) and not bool((goals == ids).float().mean() > 0.95)
