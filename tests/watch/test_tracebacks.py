"""A traceback through the watching reads as it would without it."""

import sys
import traceback

import torch
from torch import nn

from surefoot.watch import tracebacks
from surefoot.watch.tracebacks import without_watching

OURS = tracebacks.__file__.replace("tracebacks.py", "function_recorder.py")


class Broken(nn.Module):
    def forward(self, x):
        return x @ torch.ones(9, 9)


def trace_of(work):
    try:
        work()
    except Exception:
        return sys.exc_info()[2]
    raise AssertionError("nothing was raised")


def shown(trace):
    return [(entry.filename, entry.lineno, entry.name) for entry in traceback.extract_tb(trace)]


def test_a_hook_on_a_module_leaves_no_line():
    plain, hooked = Broken(), Broken()
    hooked.register_forward_hook(lambda *_: None)
    results = []
    for model in (plain, hooked):

        def call(model=model):
            model(torch.ones(2, 2))

        results.append(trace_of(call))
    assert shown(results[1]) != shown(results[0])
    assert shown(without_watching(results[1])) == shown(results[0])


def test_a_module_in_a_module_is_shown_once_each():
    model = nn.Sequential(Broken())
    model.register_forward_pre_hook(lambda *_: None)
    model[0].register_forward_pre_hook(lambda *_: None)
    found = [name for _, _, name in shown(without_watching(trace_of(lambda: model(torch.ones(2, 2)))))]
    assert found.count("_call_impl") == 2
    assert found.count("inner") == 0
    assert found[-1] == "forward"


def test_lines_of_the_watching_are_taken_out():
    scope = {}
    exec(compile("def through(work):\n    return work()\n", OURS, "exec"), scope)

    def fail():
        raise ValueError

    trace = trace_of(lambda: scope["through"](fail))
    assert OURS in [filename for filename, _, _ in shown(trace)]
    cleaned = shown(without_watching(trace))
    assert OURS not in [filename for filename, _, _ in cleaned]
    assert [name for _, _, name in cleaned] == ["trace_of", "<lambda>", "fail"]


def test_a_function_that_hands_itself_to_the_recorder_is_shown_once():
    class Recorder(torch.overrides.TorchFunctionMode):
        pass

    scope = {}
    source = "def recorded(self, function, types, args=(), kwargs=None):\n    return function(*args, **kwargs or {})\n"
    exec(compile(source, OURS, "exec"), scope)
    Recorder.__torch_function__ = scope["recorded"]

    def watched():
        with Recorder():
            nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 5]))

    def plain():
        nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 5]))

    names = [name for _, _, name in shown(without_watching(trace_of(watched)))]
    assert names == ["trace_of", "watched", *[name for _, _, name in shown(trace_of(plain))[2:]]]


def test_a_traceback_that_has_nothing_of_ours_stays_as_it_is():
    trace = trace_of(lambda: 1 / 0)
    assert shown(without_watching(trace)) == shown(trace)


def test_the_ordinary_branch_of_a_module_call_is_found():
    code = nn.Module._call_impl.__code__
    place = tracebacks._direct_call()
    assert place is not None
    assert any(begin <= place[0] < end and line == place[1] for begin, end, line in code.co_lines())
