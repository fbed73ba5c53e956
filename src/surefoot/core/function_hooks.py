"""Hooks that are called when a function is called, without replacing the function.

A replaced function is a different object: torch's device contexts, `torch.overrides`, TorchScript and numba identify
functions by identity, pickle by name, warnings by the calling frame, and code that imported it earlier still has the
old one. So nothing is replaced. A function written in Python keeps its identity, and its code gets two more calls: one
at its beginning, one where it returns. Names, signature, source, line numbers and aliases are unchanged, no frame is
added to a traceback, and the two calls are absent while torch compiles.

The new code is compiled from the function's own source, after a check that this is the source of the running code.
Functions written in C, and those without source, cannot be hooked in this way.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_HOOK = "@surefoot"
"""Replaces the hook among the constants of the new code, until the hook itself is inserted."""
_TOKEN = "__surefoot__"
"""The variable that holds the result of `enter`."""
_RESULT = "__surefoot_result__"
_FUTURES = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


class Hook:
    """The object that the new code of a function calls.

    `before(args, kwargs)` gets the function's parameters, including defaults; its result is the token. If that is not
    `None`, `after(token, result)` is called when the function returns, and `last(token)` when it ends, with or without
    an exception. The result of `after`, unless it is `None`, is returned to the caller.
    """

    __slots__ = ("end", "enter", "leave")

    def __init__(
        self,
        before: Callable[[Any, Any], Any],
        after: Callable[[Any, Any], Any] | None = None,
        last: Callable[[Any], None] | None = None,
    ) -> None:
        def leave(token: Any, result: Any) -> Any:
            if after is not None:
                other = after(token, result)
                return result if other is None else other
            return result

        self.enter, self.leave, self.end = before, leave, last

    @staticmethod
    def listed(values: Any) -> Any:
        """An iterable that can be consumed only once, as a list."""
        return values if isinstance(values, (list, tuple, torch.Tensor)) else list(values)


def _both(first: Hook, second: Hook) -> Hook:
    """Two hooks as one."""

    def before(args: Any, kwargs: Any) -> Any:
        tokens = first.enter(args, kwargs), second.enter(args, kwargs)
        return None if tokens == (None, None) else tokens

    def after(tokens: Any, result: Any) -> Any:
        for hook, token in zip((first, second), tokens, strict=True):
            if token is not None:
                result = hook.leave(token, result)
        return result

    def last(tokens: Any) -> None:
        for hook, token in zip((first, second), tokens, strict=True):
            if token is not None and hook.end is not None:
                hook.end(token)

    return Hook(before, after, None if first.end is None and second.end is None else last)


class _OriginalFunction(NamedTuple):
    """The original state of a hooked function."""

    original: types.CodeType
    hooks: tuple[Hook, ...] = ()
    """The hooks, in the order in which they were added."""
    always: bool = False
    listed: str | None = None


_heard: weakref.WeakKeyDictionary[types.FunctionType, _OriginalFunction] = weakref.WeakKeyDictionary()


def add_hook(function: Any, hook: Hook, always: bool = False, listed: str | None = None) -> None:
    """Make a function call a hook at its beginning and when it returns.

    For a function that wraps another one, the inner one is hooked.

    `always`: also when it ends with an exception. `listed`: a parameter that the hook needs to iterate over, too.
    """
    _add(inspect.unwrap(function), hook, always, listed)


def add_hook_to_wrapper(function: Any, hook: Hook) -> None:
    """Like `add_hook`, but for a function that wraps another one, the wrapper itself is hooked."""
    _add(function, hook, always=False, listed=None)


def _add(function: Any, hook: Hook, always: bool, listed: str | None) -> None:
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is not written in Python")
    code = function.__code__
    held = _held(function)
    known = _OriginalFunction(code)
    if held is not None:
        known = _heard.get(function, _OriginalFunction(code, (held,)))
    hooks = (*known.hooks, hook)
    if held is not None and (known.always or not always) and listed in (None, known.listed):
        _heard[function] = known._replace(hooks=hooks)
        _put(function, held, _together(hooks, known.always))
        return
    now = _OriginalFunction(known.original, hooks, always or known.always, listed or known.listed)
    function.__code__ = known.original
    try:
        function.__code__ = _instrumented(function, _together(hooks, now.always), now)
    except BaseException:
        function.__code__ = code
        raise
    _heard[function] = now


def remove_hook(function: Any, hook: Hook) -> None:
    """Remove a hook from a function. Without other hooks it gets its original code back."""
    _remove(inspect.unwrap(function), hook)


def _remove(function: Any, hook: Hook) -> None:
    held, known = _held(function), _heard.get(function)
    if held is None or known is None:
        return  # other code has replaced its code
    left = tuple(each for each in known.hooks if each is not hook)
    if left:
        _heard[function] = known._replace(hooks=left)
        _put(function, held, _together(left, known.always))
    else:
        function.__code__ = _heard.pop(function).original


def _held(function: types.FunctionType) -> Hook | None:
    """The hook in the code of a function, which may combine several."""
    return next((value for value in function.__code__.co_consts if isinstance(value, Hook)), None)


def _together(hooks: tuple[Hook, ...], always: bool) -> Hook:
    """Several hooks as one; with `always`, one whose end can be called."""
    found = functools.reduce(_both, hooks)
    if always and found.end is None:
        return _both(found, Hook(_not_observed, None, _nothing))
    return found


def _not_observed(args: Any, kwargs: Any) -> None:
    """The call is not observed further."""


def _nothing(token: Any) -> None:
    """The call has ended."""


def _put(function: types.FunctionType, old: Hook, new: Hook) -> None:
    """Replace the hook that the code of a function calls."""
    code = function.__code__
    function.__code__ = code.replace(co_consts=tuple(new if value is old else value for value in code.co_consts))


def _instrumented(function: types.FunctionType, hook: Hook, how: _OriginalFunction) -> types.CodeType:
    """The code of a function with the calls of a hook in it."""
    code = function.__code__
    tree = _parsed(function)
    if _words(_compiled(tree, function)) != _words(code):
        raise ValueError(f"the source of {function.__qualname__} is not what runs")
    definition = _definition(tree, code.co_name)
    _instrument(definition, "torch" in function.__globals__, how.always, how.listed)
    new = _compiled(tree, function)
    for name in ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_freevars", "co_firstlineno"):
        if getattr(new, name) != getattr(code, name):
            raise ValueError(f"the code of {function.__qualname__} cannot be rebuilt: {name} differs")
    constants = tuple(hook if value == _HOOK else value for value in new.co_consts)
    named = {"co_qualname": getattr(code, "co_qualname")} if sys.version_info >= (3, 11) else {}  # noqa: B009
    return new.replace(co_consts=constants, **named)


def _words(code: types.CodeType) -> tuple[Any, ...]:
    """The names and constants of a function: they differ if its source has changed since it was loaded."""
    constants = [value for value in code.co_consts if not isinstance(value, types.CodeType)]
    inside = [_words(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    return code.co_names, code.co_varnames, code.co_freevars, repr(constants), inside


def _parsed(function: types.FunctionType) -> ast.Module:
    """The function's source, inside a class if it is a method: names with two underscores and `super` need one."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    text = "".join(lines[code.co_firstlineno - 1 : _last_line(code, lines)])
    owners = [name for name in function.__qualname__.split(".")[:-1] if name != "<locals>"]
    outer = [name for name in code.co_freevars if name != "__class__"]
    lines_before = code.co_firstlineno - 1  # numbered as in the file, for tracebacks and warnings
    if not text[:1].isspace():
        return ast.parse("\n" * lines_before + text)
    opening = f"class {owners[-1]}:" if owners else "if True:"
    if outer:  # a nested function that uses variables of the outer one
        opening = f"def __outer__({', '.join(outer)}):"
    return ast.parse("\n" * (lines_before - 1) + f"{opening}\n{text}")


def _last_line(code: types.CodeType, lines: list[str]) -> int:
    """The last line of a function, including nested functions."""
    positions: list[tuple[int | None, ...]] = []
    if sys.version_info >= (3, 11):
        positions = list(code.co_positions())
    if all(column is None for *_, column in positions):  # as with `python -X no_debug_ranges`
        return code.co_firstlineno - 1 + len(inspect.getblock(lines[code.co_firstlineno - 1 :]))
    own = max((end for _, end, _, _ in positions if end is not None), default=code.co_firstlineno)
    return max([own, *(_last_line(value, lines) for value in code.co_consts if isinstance(value, types.CodeType))])


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"no function {name} in its own source")


def _compiled(tree: ast.Module, function: types.FunctionType) -> types.CodeType:
    """The function's code object, from that of the module."""
    code = function.__code__
    flags = code.co_flags & _FUTURES
    whole = compile(tree, code.co_filename, "exec", flags=flags, dont_inherit=True)
    for found in _codes(whole):
        if found.co_name == code.co_name:
            return found
    raise ValueError(f"no code of {function.__qualname__} in its own source")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code objects inside another one, outermost first."""
    waiting = [code]
    while waiting:
        inner = [value for value in waiting.pop(0).co_consts if isinstance(value, types.CodeType)]
        yield from inner
        waiting.extend(inner)


def _instrument(definition: ast.FunctionDef, knows_torch: bool, always: bool, listed: str | None) -> None:
    """Insert the calls of the hook into a function."""
    given = definition.args
    arguments = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    items = [*arguments, *([f"*{given.vararg.arg}"] if given.vararg else [])]
    named = [f"{argument.arg!r}: {argument.arg}" for argument in given.kwonlyargs]
    named += [f"**{given.kwarg.arg}"] if given.kwarg else []
    call = f"({', '.join(items)}{',' if items else ''}), {{{', '.join(named)}}}"
    lines = [f"    {listed} = {_HOOK!r}.listed({listed})"] if listed else []
    lines.append(f"    {_TOKEN} = {_HOOK!r}.enter({call})")
    # Dynamo evaluates this to a constant when it compiles: the hook is not compiled.
    test = "not torch.compiler.is_compiling()" if knows_torch else "True"
    body = definition.body
    has_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    text, body = (body[:1], body[1:]) if has_text else ([], body)
    first = (body or text)[0]
    before = ast.parse("\n".join([f"{_TOKEN} = None", f"if {test}:", *lines])).body
    end = (body or text)[-1]
    after = ast.parse(f"if {_TOKEN} is not None:\n    {_HOOK!r}.leave({_TOKEN}, None)").body
    _place(before, first, start=True)
    _place(after, end, start=False)
    body = _Returns().visit(ast.Module(body, [])).body
    if always:
        finally_ = ast.parse(f"if {_TOKEN} is not None:\n    {_HOOK!r}.end({_TOKEN})").body
        _place(finally_, end, start=False)
        guarded = ast.Try(body=[*body, *after], handlers=[], orelse=[], finalbody=finally_)
        ast.copy_location(guarded, first)
        definition.body = [*text, *before, guarded]
    else:
        definition.body = [*text, *before, *body, *after]


class _Returns(ast.NodeTransformer):
    """Makes a `return` pass its value to the hook; nested functions are unchanged."""

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, ast.expr) else super().visit(node)  # no expression contains a `return`

    def visit_Return(self, node: ast.Return) -> Any:
        value = node.value or ast.copy_location(ast.Constant(None), node)
        kept = ast.parse(f"{_RESULT} = None").body[0]
        answer = ast.parse(f"{_RESULT} if {_TOKEN} is None else {_HOOK!r}.leave({_TOKEN}, {_RESULT})", mode="eval").body
        _place([kept, answer], value, start=False)
        assert isinstance(kept, ast.Assign)
        kept.value = value
        node.value = answer
        return [kept, node]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node


def _place(nodes: list[Any], at: Any, start: bool) -> None:
    """Give new nodes the first or last line of an old one."""
    line, column = (at.lineno, at.col_offset) if start else (at.end_lineno, at.end_col_offset)
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, (ast.stmt, ast.expr)):
                part.lineno = part.end_lineno = line
                part.col_offset = part.end_col_offset = column
