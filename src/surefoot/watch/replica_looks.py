"""Records fingerprints of each rank for a comparison between ranks, at the same steps on every rank.

At such a step, fingerprints of an optimizer's parameters, their gradients and the optimizer's state are computed right
before it steps, then those of the parameters after the step and before the next one. The steps are chosen by their
number alone, so that every rank chooses the same ones. Nothing is exchanged: `surefoot diagnose` compares the files of
the ranks (`record.rank_file`). No collective is started, and nothing waits for a device.

Only parameters that every rank holds completely are compared. Shards of FSDP and DTensor differ between ranks, and so
do parameters that DDP ignores.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.device import name_of
from surefoot.core.files import make_subfolder, read_file
from surefoot.core.user_code import is_users, place
from surefoot.core.without_hooks import WithoutHooks
from surefoot.guard.model_sampling import RANK_STEPS
from surefoot.observe.fingerprints import fingerprints, state_fingerprints
from surefoot.observe.parameters import learning_rate, plain_name
from surefoot.observe.readable import is_sharded
from surefoot.record.facts import Fingerprints, GroupSettings, RankLoader, RankOptimizer, RankSetup, ReplicaLook
from surefoot.record.facts.ranks import SHARDED, UNWRAPPED, WRAPPED
from surefoot.record.rank_file import RankFile
from surefoot.watch.deferred import ArrivalQueue, deferred_so_far, later

if TYPE_CHECKING:
    from collections.abc import Iterator

    from surefoot.record.facts import StepBatch
    from surefoot.watch.context import WatchContext
    from surefoot.watch.optimizer_record import OptimizerRecord
    from surefoot.watch.patches.hooks import Hooks

PROBE = "ranks"
"""The name under which a failure is reported."""
WHY_WRAPPER = "with several ranks: which parameters are replicas, and whether their gradients are averaged"
WHY_COLLECTIVES = "with several ranks: how much data the script itself exchanges"
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
_GROUPS = 8
_MOST_FILES = 200
_VERSIONS = 4
"""The number of gradients of a model whose versions are compared: code that clips changes all of them."""
_AVERAGING_HOOKS = ("allreduce", "compress", "powersgd", "quantization", "noop_pg")
"""Communication hooks of torch whose name contains one of these leave equal gradients on all ranks."""


@dataclass
class _OpenLook:
    """An incomplete record: the step, or the one after it, has not begun."""

    facts: ReplicaLook
    deferred_before: int


@dataclass
class _Forwards:
    """The forward calls of one DDP model."""

    synchronized: bool = False
    """Whether the last forward call requested averaged gradients."""


class RankNotes:
    """Writes the file of this rank."""

    def __init__(self, context: WatchContext) -> None:
        self._context = context
        self._file: RankFile | None = None

    def append(self, entry: RankOptimizer | ReplicaLook) -> None:
        """Write a line; before the first one, a description of the rank's set-up."""
        if self._file is None:
            make_folder = self._context.options.folder
            assert make_folder is not None
            folder = make_folder()
            make_subfolder(folder)
            self._file = RankFile(folder)
            self._file.append(self._setup())
        self._file.append(entry)

    def write_look(self, look: ReplicaLook) -> None:
        """Write a record, with the data of its step."""
        batch = self._batch_of(look.backwards)
        if batch is not None:
            look = replace(look, inputs=batch.input_print, targets=batch.target_print)
        self.append(look)

    def _batch_of(self, backwards: int) -> StepBatch | None:
        """The data of the last of this many backward calls."""
        for batch in reversed(self._context.data.batches):
            if batch.backward == backwards:
                return batch
            if batch.backward < backwards:
                return None
        return None

    def _device(self) -> str:
        """The name of the device of the first known parameter."""
        held = [tensor for each in self._context.registry.parameters if (tensor := each.tensor()) is not None]
        device = held[0].device if held else torch.device("cpu")
        return "cpu" if device.type == "cpu" else name_of(device)

    def _setup(self) -> RankSetup:
        options = self._context.options
        return RankSetup(
            rank=options.rank,
            world_size=options.world_size,
            initialized=dist.is_available() and dist.is_initialized(),
            torch=str(torch.__version__),
            python=platform.python_version(),
            device=self._device(),
            code=dict(_code()),
            seed=torch.initial_seed(),
            loaders=[
                RankLoader(sampler=each.sampler, rows=each.rows, batch_size=each.batch_size)
                for each in self._context.calls.loaders
            ],
        )


class ReplicaLooks:
    """Records fingerprints of the optimizers of this rank. Does nothing in a run of one process."""

    def __init__(self, context: WatchContext) -> None:
        self._context, self._registry = context, context.registry
        self.is_on = context.options.world_size > 1 and context.options.folder is not None
        self._notes = RankNotes(context)
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._forwards: weakref.WeakKeyDictionary[DistributedDataParallel, _Forwards] = weakref.WeakKeyDictionary()
        self._communicated = 0
        self._wrapper_of_optimizer: dict[int, weakref.ref[DistributedDataParallel]] = {}
        """The model of each optimizer by its number, as of the last record."""
        self._unsynchronized: Counter[int] = Counter()
        """The number of steps whose last forward did not request averaged gradients, by optimizer."""
        self._next_is_due: dict[int, bool] = {}
        """Whether the next step of an optimizer is recorded, by its number."""
        self._versions: dict[int, int] = {}
        """The version counters of some averaged gradients after the last backward, by the `id` of the parameter."""
        self._open: dict[int, _OpenLook] = {}
        self._described: dict[int, RankOptimizer] = {}
        self._arriving: ArrivalQueue[ReplicaLook] = ArrivalQueue(self._notes.write_look)

    def install(self, hooks: Hooks) -> None:
        """Add the hooks. Called once, before the script begins."""
        if not self.is_on or not dist.is_available():
            return

        def forward_began(args: Any, kwargs: Any) -> None:
            wrapper = args[0]
            if torch.is_grad_enabled():
                self._forwards[wrapper] = _Forwards(bool(wrapper.require_backward_grad_sync))

        def communicating(args: Any, kwargs: Any) -> None:
            given = [*args, *kwargs.values()]
            self._communicated += max((each.numel() for each in given if isinstance(each, Tensor)), default=0)

        def made(_: Any, args: Any, kwargs: Any) -> None:
            self._wrappers.add(args[0])

        hooks.after(DistributedDataParallel, "__init__", PROBE, made, WHY_WRAPPER)
        hooks.add(DistributedDataParallel, "_pre_forward", PROBE, WHY_WRAPPER, forward_began)
        for name in COLLECTIVES:
            hooks.add(dist, name, PROBE, WHY_COLLECTIVES, communicating)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def after_backward(self) -> None:
        """A backward has finished: note the versions of a few gradients, if the next step is recorded."""
        if not self.is_on or (self._next_is_due and not any(self._next_is_due.values())):
            return
        with WithoutHooks():
            few = [each for wrapper in self._wrappers for each in _averaged(wrapper)[:_VERSIONS]]
            self._versions = {id(each): each.grad._version for each in few if each.grad is not None}

    def before_step(self, record: OptimizerRecord, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step; its gradients are complete."""
        if not self.is_on:
            return
        step, open_look = record.series.count, self._open.pop(record.number, None)
        is_due, self._next_is_due[record.number] = RANK_STEPS.due(step), RANK_STEPS.due(step + 1)
        self._count_unsynchronized(record.number)
        if not is_due and open_look is None:
            return
        with WithoutHooks():
            held = self._held(record, optimizer)
            parameters = _taken([parameter.detach() for parameter in held])
            if open_look is not None:
                self._complete(open_look, later(_total, parameters))
            if is_due and held:
                self._look(record, optimizer, step, held, parameters)

    def _count_unsynchronized(self, number: int) -> None:
        known = self._wrapper_of_optimizer.get(number)
        wrapper = None if known is None else known()
        forwards = None if wrapper is None else self._forwards.get(wrapper)
        self._unsynchronized[number] += forwards is not None and not forwards.synchronized

    def after_step(self, record: OptimizerRecord, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        open_look = self._open.get(record.number)
        if open_look is None or open_look.facts.after is not None:
            return
        with WithoutHooks():
            parameters = _taken([parameter.detach() for parameter in self._held(record, optimizer)])
            open_look.facts = replace(open_look.facts, after=later(_total, parameters))

    def settle(self) -> None:
        """Write the records that are not complete yet. Waits for the device."""
        for number in list(self._open):
            self._complete(self._open.pop(number), None)
        self._arriving.settle(wait=True)

    def _complete(self, look: _OpenLook, following: str | None) -> None:
        facts = replace(look.facts, next=following)
        self._arriving.add(facts, deferred_so_far() > look.deferred_before)
        self._arriving.settle(wait=False)

    def _look(
        self,
        record: OptimizerRecord,
        optimizer: torch.optim.Optimizer,
        step: int,
        held: list[Tensor],
        parameters: Tensor,
    ) -> None:
        before = deferred_so_far()
        state, wrapper = self._context.state, self._wrapper_of(held)
        forwards = self._forwards.get(wrapper) if wrapper is not None else None
        if wrapper is not None:
            self._wrapper_of_optimizer[record.number] = weakref.ref(wrapper)
        gradients = _taken([parameter.grad for parameter in held], parameters.device)
        facts = ReplicaLook(
            step=step,
            optimizer=record.number,
            backwards=state.backwards,
            lr=[later(float, rate) for rate in _rates(optimizer)],
            parameters=later(_packed, parameters),
            gradients=later(_packed, gradients),
            moments=later(_packed, state_fingerprints(optimizer, held, parameters.device)),
            has_gradients=later(_any, gradients),
            scale=self._scale(),
            skips=state.scaler.skips,
            wrapper_called=None if wrapper is None else forwards is not None,
            synchronized=None if forwards is None else forwards.synchronized,
            communicated=self._communicated,
            unsynchronized_steps=self._unsynchronized[record.number],
            gradients_changed=self._were_changed(held),
            uneven=wrapper is not None and wrapper._join_config.enable,
        )
        self._open[record.number] = _OpenLook(facts, before)

    def _were_changed(self, held: list[Tensor]) -> bool | None:
        """Whether gradients were changed since the last backward, as far as their versions were noted."""
        known = [(self._versions[id(each)], each.grad) for each in held if id(each) in self._versions]
        return any(now is None or now._version != before for before, now in known) if known else None

    def _scale(self) -> float | None:
        """The loss scale of this step, which may be on a device."""
        held = self._context.state.scale
        scale = held() if held is not None else None
        return None if scale is None else later(float, scale.detach().reshape(()).clone())

    # ---- what is compared -------------------------------------------------------------------------------------------

    def _held(self, record: OptimizerRecord, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The parameters that every rank holds completely; when they are new, a description of them is written."""
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        averaged = {id(parameter) for wrapper in self._wrappers for parameter in _averaged(wrapper)}
        is_wrapped = any(id(parameter) in averaged for parameter in every)
        is_sharded_model = any(map(is_sharded, every)) or self._has_shards()
        held = [
            parameter
            for parameter in every
            if not is_sharded(parameter) and (id(parameter) in averaged if is_wrapped else not is_sharded_model)
        ]
        kind = WRAPPED if is_wrapped else SHARDED if is_sharded_model else UNWRAPPED
        layout = _hash(repr([(tuple(each.shape), str(each.dtype)) for each in held]).encode())
        known = self._described.get(record.number)
        if known is None or known.layout != layout or known.parallel != kind:
            self._describe(record, optimizer, held, kind, layout)
        return held

    def _describe(
        self, record: OptimizerRecord, optimizer: torch.optim.Optimizer, held: list[Tensor], kind: str, layout: str
    ) -> None:
        wrapper = self._wrapper_of(held)
        made = RankOptimizer(
            number=record.number,
            type=record.type,
            site=record.site,
            settings=[GroupSettings.of(group) for group in optimizer.param_groups[:_GROUPS]],
            parallel=kind,
            members=None if wrapper is None else _members(wrapper),
            names=[plain_name(self._registry.label(self._registry.add(each))) for each in held],
            elements=sum(each.numel() for each in held),
            layout=layout,
            has_own_hook=wrapper is not None and _has_own_hook(wrapper),
        )
        self._described[record.number] = made
        self._notes.append(made)

    def _wrapper_of(self, held: list[Tensor]) -> DistributedDataParallel | None:
        wanted = {id(parameter) for parameter in held}
        fitting = [w for w in self._wrappers if any(id(parameter) in wanted for parameter in _averaged(w))]
        called = [wrapper for wrapper in fitting if wrapper in self._forwards]
        return next(iter(called or fitting), None)

    def _has_shards(self) -> bool:
        """Whether a model of FSDP version 1 was called, whose parameters look like plain ones."""
        models = self._registry.models_now()
        return any(type(part).__name__ == "FullyShardedDataParallel" for model in models for part in model.modules())


def _averaged(wrapper: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients a DDP averages."""
    named = wrapper.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in wrapper.parameters_to_ignore]


def _members(wrapper: DistributedDataParallel) -> list[int] | None:
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    return None if len(ranks) == dist.get_world_size() else ranks


def _has_own_hook(wrapper: DistributedDataParallel) -> bool:
    names = [getattr(hook, "__qualname__", "").lower() for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    return any("local" in name or not any(word in name for word in _AVERAGING_HOOKS) for name in names)


def _rates(optimizer: torch.optim.Optimizer) -> list[Tensor | float]:
    found = [learning_rate(group) for group in optimizer.param_groups[:_GROUPS]]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in found if rate is not None]


def _taken(tensors: list[Tensor | None] | list[Tensor], device: torch.device | None = None) -> Tensor:
    """The fingerprints of the tensors, on one device."""
    home = device or next((each.device for each in tensors if each is not None), torch.device("cpu"))
    return fingerprints(tensors, home)


def _packed(vector: Tensor) -> Fingerprints:
    bits = vector.contiguous().view(torch.int32).reshape(-1, 2)
    folded = (bits[:, 0] ^ bits[:, 1]).contiguous()
    return Fingerprints(total=_total(vector), each=base64.b64encode(folded.numpy().tobytes()).decode("ascii"))


def _total(vector: Tensor) -> str:
    return _hash(vector.contiguous().numpy().tobytes())


def _any(vector: Tensor) -> bool:
    return bool((vector != 0).any())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _code() -> Iterator[tuple[str, str]]:
    """The script and the imported modules of its author, each with a hash of its text."""
    files = [getattr(module, "__file__", None) for module in sys.modules.copy().values()]
    for name in sorted({file for file in files if isinstance(file, str) and is_users(file)})[:_MOST_FILES]:
        try:
            yield place(name, 0).removesuffix(":0"), _hash(read_file(Path(name)))
        except OSError:
            continue
