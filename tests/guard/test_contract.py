"""What every exported part promises. The parts are found in `surefoot.__all__`: exporting one is testing it."""

import inspect
import io
import math
import re
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot as sf
from part_arguments import ARGUMENTS, made
from streams import INF, NAN, same
from surefoot import LayerStats, Signals
from surefoot.core.state_tree import on_device, pack, unpack
from surefoot.detect import step_rules
from surefoot.types import GradientNorms, NamedParameter

TENSORS = 3
"""How many gradients a clipper is told of."""


# ---- finding the parts ----------------------------------------------------------------------------------------------


def has(thing, *methods):
    return all(callable(getattr(thing, method, None)) for method in methods)


def class_of(name):
    """The exported class, or the class of what the exported function returns."""
    thing = getattr(sf, name)
    return thing.__globals__.get(thing.__annotations__["return"]) if inspect.isfunction(thing) else thing


def makes_a_part(name):
    """Whether this is a class of parts, or a function that makes one. Protocols describe parts and are none."""
    thing = class_of(name)
    if not inspect.isclass(thing) or getattr(thing, "_is_protocol", False):
        return False
    return is_dataclass(thing) and (has(thing, "init", "update") or has(thing, "shape"))


NAMES = [name for name in sf.__all__ if makes_a_part(name)]


def kind_of(name):
    part = class_of(name)
    if has(part, "shape"):
        return "shaper"
    if has(part, "scale_of"):
        return "scaler"
    if "anomalous" in inspect.signature(part.update).parameters:
        return "escalation"
    if "broken" in inspect.signature(part.update).parameters:
        return "recovery"
    return "clipper" if "norms" in inspect.signature(part.update).parameters else "detector"


def named(*kinds):
    return [name for name in NAMES if kind_of(name) in kinds]


STEP_RULES = {class_of(name) for name in NAMES if class_of(name).__module__ == step_rules.__name__}
"""All that is exported from there, whether it runs by default or not."""


def judges_on_the_device(name):
    """Whether a part is written with tensor operations alone: the step rules are, and what is combined from them."""
    if kind_of(name) != "detector":
        return kind_of(name) not in ("escalation", "recovery")
    inner = ARGUMENTS.get(name, ())
    return getattr(sf, name) in STEP_RULES or any(type(part) in STEP_RULES for part in inner)


every_part = pytest.mark.parametrize("name", NAMES)
every_stateful_part = pytest.mark.parametrize("name", [name for name in NAMES if kind_of(name) != "shaper"])
every_shaper = pytest.mark.parametrize("name", named("shaper"))
every_device_part = pytest.mark.parametrize(
    "name", [name for name in NAMES if judges_on_the_device(name) and kind_of(name) != "shaper"]
)


def test_every_kind_of_part_is_found():
    assert {kind_of(name) for name in NAMES} == {
        "clipper",
        "detector",
        "escalation",
        "recovery",
        "scaler",
        "shaper",
    }
    assert {"ClipPerTensor", "Spike", "StabilityChecker", "sustained", "AdaptiveUnitClip"} <= set(NAMES)
    assert set(ARGUMENTS) <= set(NAMES)


# ---- feeding them ---------------------------------------------------------------------------------------------------


def layers(value):
    norms = torch.tensor([value, 2 * value, value])
    return LayerStats(("a", "b", "c"), (2, 2, 2), norms, norms, (~norms.isfinite()).float())


def signals(value, step=0):
    """One step whose loss and gradient norm are `value`."""
    bad = 0.0 if math.isfinite(value) else 1.0
    factor = 0.5 if math.isfinite(value) else value
    return Signals(step, value, abs(value), bad, clip_factor=factor, layers=layers(value))


def norms(value):
    each = torch.full((TENSORS,), value)
    return GradientNorms(torch.linalg.vector_norm(each), each)


def begin(part, kind):
    return part.init(TENSORS) if kind == "clipper" else part.init()


def advance(part, kind, state, value, step=0):
    """The next state, and what the part said about the step as plain values."""
    if kind == "clipper":
        state, factor = part.update(state, norms(value))
        return state, factor.tolist()
    if kind == "scaler":
        state = part.update(state, torch.tensor(not math.isfinite(value)))
        return state, part.scale_of(state).item()
    if kind == "escalation":
        return part.update(state, not math.isfinite(value) or value > 1e3, "reason")
    if kind == "recovery":
        return part.update(state, step, refused=not math.isfinite(value), setback=value > 1e3)
    state, verdict = part.update(state, signals(value, step))
    return state, (bool(verdict.anomalous), verdict.severity, verdict.summary)


def run(part, kind, stream, state=None, first=0):
    state, said = begin(part, kind) if state is None else state, []
    for i, value in enumerate(stream):
        state, result = advance(part, kind, state, value, first + i)
        said.append(result)
    return state, said


HEALTHY = [1.0 + 0.125 * (i % 3) for i in range(160)]
ROUGH = [*HEALTHY[:70], NAN, 1e6, 1e6, *HEALTHY[:5], INF, 0.0, 1e4, NAN, *HEALTHY[:20], 1e6, 1.0, NAN, 1.0]


# ---- the contract ---------------------------------------------------------------------------------------------------


@every_part
def test_a_part_can_be_made_and_equals_one_made_alike(name):
    assert made(name) == made(name)
    assert hash(made(name)) == hash(made(name))


@every_part
def test_a_part_is_frozen(name):
    part = made(name)
    for setting in [each.name for each in fields(part)] or ["anything"]:
        with pytest.raises(FrozenInstanceError):
            setattr(part, setting, 3)


@every_part
def test_a_part_prints_as_what_makes_it(name):
    part = made(name)
    known = vars(sf) | vars(sys.modules[type(part).__module__])
    assert eval(repr(part), dict(known)) == part


@every_part
def test_a_part_says_what_it_does(name):
    assert (getattr(sf, name).__doc__ or "").strip()
    assert not class_of(name).__doc__.startswith(f"{class_of(name).__name__}(")  # what dataclasses put there themselves


@every_stateful_part
def test_a_saved_state_continues_as_if_it_had_never_been_saved(name):
    part, kind = made(name), kind_of(name)
    for cut in (0, 1, 50, 75, len(ROUGH) - 3):
        state, _ = run(part, kind, ROUGH[:cut])
        again = unpack(begin(part, kind), through_a_file(pack(state)))
        assert same(pack(again), pack(state))
        expected = run(part, kind, ROUGH[cut:], state, cut)
        found = run(part, kind, ROUGH[cut:], again, cut)
        assert found[1] == expected[1]
        assert same(pack(found[0]), pack(expected[0]))


def through_a_file(packed):
    """Saved and loaded without running any code from the file."""
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_stateful_part
def test_the_same_input_gets_the_same_verdict_and_leaves_the_old_state_alone(name):
    part, kind = made(name), kind_of(name)
    state, _ = run(part, kind, ROUGH)
    before = pack(state)
    for value in (1.0, 1e6, NAN, INF, 0.0):
        first, second = (advance(part, kind, state, value, len(ROUGH)) for _ in range(2))
        assert first[1] == second[1]
        assert same(pack(first[0]), pack(second[0]))
        assert same(pack(state), before)


@every_stateful_part
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("history", [0, 1, 160])
def test_a_nan_now_and_a_healthy_verdict_next(name, bad, history):
    part, kind = made(name), kind_of(name)
    state, _ = run(part, kind, HEALTHY[:history])
    state, _ = advance(part, kind, state, bad, history)
    state, said = run(part, kind, HEALTHY[:3], state, history + 1)
    if kind == "clipper":
        assert said == run(part, kind, HEALTHY[:history] + HEALTHY[:3])[1][-3:]
    elif kind in ("escalation", "recovery"):
        assert [decision.action for decision in said] == ["none"] * 3
    elif kind == "scaler":
        assert all(math.isfinite(scale) and scale > 0 for scale in said)
    else:
        assert [anomalous and severity != "info" for anomalous, severity, _ in said] == [False] * 3


@pytest.mark.parametrize("name", named("clipper", "detector"))
def test_what_is_refused_does_not_move_the_baseline(name):
    """A broken step changes nothing of what a part has measured, but for its counters."""
    part, kind = made(name), kind_of(name)
    state, _ = run(part, kind, HEALTHY)
    after, _ = advance(part, kind, state, NAN, len(HEALTHY))
    assert same(measured(pack(after)), measured(pack(state)))


def measured(packed):
    """A packed state without its counters of steps."""
    if isinstance(packed, dict):
        return {key: measured(value) for key, value in packed.items() if key not in ("seen", "refused")}
    return [measured(value) for value in packed] if isinstance(packed, list) else packed


@every_stateful_part
def test_the_state_does_not_grow(name):
    part, kind = made(name), kind_of(name)
    stream = [1.0 + 0.125 * (i % 5) if i % 50 else NAN for i in range(1_400)]
    state, _ = run(part, kind, stream[:1_250])
    size = elements(pack(state))
    state, _ = run(part, kind, stream[1_250:], state, 1_250)
    assert elements(pack(state)) == size


def elements(packed):
    if isinstance(packed, torch.Tensor):
        return packed.numel()
    values = packed.values() if isinstance(packed, dict) else packed if isinstance(packed, list) else None
    return 1 if values is None else sum(map(elements, values))


# ---- settings -------------------------------------------------------------------------------------------------------


def numeric_settings():
    for name in [*NAMES, "LayerMetrics"]:
        for each in fields(class_of(name)):
            if re.search(r"\b(int|float)\b", each.type):
                yield name, each.name


@pytest.mark.parametrize("wrong", [NAN, -1e9], ids=str)
@pytest.mark.parametrize(("name", "setting"), list(numeric_settings()))
def test_a_setting_that_cannot_work_is_refused_by_name_and_value(name, setting, wrong):
    error = refusal(made(name), setting, wrong)
    assert error, f"{name} accepts {setting}={wrong}: refuse it in `__post_init__`, with `require`."
    assert f"`{setting}`" in error
    assert str(wrong) in error


def refusal(part, setting, value):
    """The error of a part that is given this value; empty if it is accepted."""
    try:
        replace(part, **{setting: value})
    except sf.SettingError as error:
        return str(error)
    return ""


# ---- on a device ----------------------------------------------------------------------------------------------------


WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")


class NoSync(TorchDispatchMode):
    """Fails on anything that makes the host wait for a device, or copies between them.

    The device is `meta`, which has no values at all: what would read one cannot work there.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"aten.{name} waits for the device"
        result = func(*args, **(kwargs or {}))
        given = {arg.device.type for arg in torch.utils._pytree.tree_leaves(args) if isinstance(arg, torch.Tensor)}
        gives = {out.device.type for out in torch.utils._pytree.tree_leaves(result) if isinstance(out, torch.Tensor)}
        assert not (given and gives - given), f"aten.{name} copies {given} to {gives}"
        return result


def test_the_guard_against_syncs_can_fail():
    value = torch.ones((), device="meta")
    for sync in (value.item, value.tolist, lambda: bool(value), value.cpu, lambda: torch.ones(()).to("meta")):
        with pytest.raises((AssertionError, RuntimeError)), NoSync():
            sync()


def device_inputs(kind, device):
    """What a part is given at a step, on the device."""
    if kind == "clipper":
        return GradientNorms(torch.ones((), device=device), torch.ones(TENSORS, device=device))
    if kind == "scaler":
        return torch.ones((), dtype=torch.bool, device=device)
    one = torch.ones((), device=device)
    return Signals(9, one, one, one, clip_factor=one)


@every_device_part
def test_nothing_waits_for_the_device(name):
    part, kind = made(name), kind_of(name)
    state = on_device(begin(part, kind), torch.device("meta"))
    given = device_inputs(kind, "meta")
    with NoSync():
        for _ in range(2):
            result = part.update(state, given)
            state = result if kind == "scaler" else result[0]
    found = torch.utils._pytree.tree_leaves((state, getattr(result[-1], "anomalous", result[-1])))
    assert {tensor.device.type for tensor in found} == {"meta"}


@every_shaper
def test_no_shaper_waits_for_the_device(name):
    parameters = [
        NamedParameter(f"p{rank}", torch.nn.Parameter(torch.ones((2,) * rank, device="meta"))) for rank in range(4)
    ]
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with NoSync():
        made(name).shape(parameters)


@every_device_part
def test_compiled_equals_eager(name):
    part, kind = made(name), kind_of(name)
    torch._dynamo.reset()

    def update(state, value, bad):
        if kind == "clipper":
            return part.update(state, GradientNorms(value * TENSORS**0.5, value.expand(TENSORS)))
        if kind == "scaler":
            return part.update(state, bad > 0), bad
        state, verdict = part.update(state, Signals(9, value, value, bad))
        return state, verdict.anomalous

    compiled = torch.compile(update, fullgraph=True, backend="eager", dynamic=False)
    states = [on_device(begin(part, kind), torch.device("cpu"))] * 2
    for value in ROUGH:
        given = (torch.tensor(value), torch.tensor(0.0 if math.isfinite(value) else 1.0))
        (eager, expected), (graph, found) = update(states[0], *given), compiled(states[1], *given)
        assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
        assert same(pack(graph), pack(eager))
        states = [eager, graph]


# ---- shapers --------------------------------------------------------------------------------------------------------


def gradients(bad=1.0):
    torch.manual_seed(0)
    shapes = {"scalar": (), "bias": (4,), "weight": (4, 3), "filter": (2, 3, 3, 3)}
    found = []
    for name, shape in shapes.items():
        parameter = torch.nn.Parameter(torch.randn(shape))
        parameter.grad = 10 * torch.randn(shape)
        found.append(NamedParameter(name, parameter))
    found[2].parameter.grad[0, 0] = bad
    return found


@every_shaper
def test_a_broken_gradient_breaks_no_other(name):
    shaper, healthy, broken = made(name), gradients(), gradients(NAN)
    shaper.shape(healthy)
    shaper.shape(broken)
    for (tensor, one), (_, other) in zip(healthy, broken, strict=True):
        if tensor != "weight":
            assert torch.equal(one.grad, other.grad)
    assert torch.equal(healthy[2].parameter.grad[1:], broken[2].parameter.grad[1:])
    assert not broken[2].parameter.grad[0, 0].isfinite()


@every_shaper
def test_a_shaper_changes_gradients_alone_and_the_same_way_each_time(name):
    shaper, first, second, untouched = made(name), gradients(), gradients(), gradients()
    shaper.shape(first)
    shaper.shape(second)
    for one, other, original in zip(first, second, untouched, strict=True):
        assert torch.equal(one.parameter.grad, other.parameter.grad)
        assert torch.equal(one.parameter, original.parameter)
    assert any(not torch.equal(a.parameter.grad, b.parameter.grad) for a, b in zip(first, untouched, strict=True))


@every_shaper
def test_a_compiled_shaper_equals_the_eager_one(name):
    shaper, eager, graph = made(name), gradients(), gradients()
    torch._dynamo.reset()
    shaper.shape(eager)
    torch.compile(shaper.shape, fullgraph=True, backend="eager", dynamic=False)(graph)
    for one, other in zip(eager, graph, strict=True):
        assert torch.equal(one.parameter.grad, other.parameter.grad)
