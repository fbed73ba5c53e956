"""Finds post-norm residuals, `norm(x + branch(x))`, by reading the source of a module's `forward`.

The source is parsed, and its values are followed from statement to statement; nothing is executed. A norm is post-norm
if all of these hold:

- its input is a sum of a value and of a branch computed from that value, which makes the sum a residual;
- no norm lies on the branch, otherwise the residual is pre-norm and the norm behind it is the final one;
- nothing but the norm uses the sum: in a pre-norm model, the sum is also an operand of the next residual.

What cannot be read leads to no finding: a branch through a function other than torch's, or through a module or method
that uses a norm, counts as a branch with a norm. Norms under an `if` are left out, unless an attribute of the module
decides it (`if self.norm_first`). Without the source, nothing is found.

Not covered: a residual whose two operands are arguments of the same `forward`, as in BERT's output layers.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_TORCH_NAMES = {"torch", "F", "nn", "functional", "math"}
"""First names of functions that contain no norm, unless their last name has "norm" in it."""

_METADATA = {"shape", "size", "dim", "ndim", "numel", "dtype", "device"}
"""Attributes of a tensor that do not depend on its values."""

_UNKNOWN = object()


def post_norms(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each module with post-norm residuals, and the names of its norms.

    Torch's own transformer layers are left out: their setting `norm_first` is the exact answer.
    """
    for name, module in model.named_modules():
        is_torchs = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        if is_torchs or not module._modules or "forward" in vars(module):
            continue
        function = _source_of(type(module).forward)
        if function is not None and (norms := _ForwardReader(module, function).post_norms()):
            yield name, [f"{name}.{norm}" if name else norm for norm in norms]


def _source_of(function: Any) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree.body[0] if tree.body and isinstance(tree.body[0], ast.FunctionDef) else None


def _is_token_norm(module: nn.Module) -> bool:
    """Whether a module is a LayerNorm, an RMSNorm, or named like these, and not a norm of images."""
    if isinstance(module, _NormBase | nn.GroupNorm | nn.LocalResponseNorm):
        return False
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.lower().endswith("norm")


def _contains_norm(module: nn.Module) -> bool:
    return any("norm" in type(each).__name__.lower() for each in module.modules())


class _Value:
    """What an expression yields, and what it was computed from."""

    def __init__(self, sources: Sequence[_Value] = (), addends: Sequence[_Value] = (), has_norm: bool = False) -> None:
        self.addends = addends  # of a sum, the values that were added
        self.uses = 0
        self.origins: set[_Value] = set()  # every value on the way to this one
        self.normed: set[_Value] = set()  # those of them behind which a norm could lie
        for each in sources:
            self.origins |= {each} | each.origins
            self.normed |= each.normed
        if has_norm:
            self.normed = self.origins

    def is_residual_without_norm(self) -> bool:
        """Whether this is a sum of a value and of a branch of it that has no norm."""
        return any(skip in branch.origins - branch.normed for skip in self.addends for branch in self.addends)


class _ForwardReader:
    """Follows the values of one `forward`."""

    def __init__(self, module: nn.Module, function: ast.FunctionDef) -> None:
        self._module = module
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self._self = arguments[0].arg if arguments else ""
        self._names = {each.arg: _Value() for each in arguments[1:]}
        self._norms: list[tuple[str, _Value]] = []
        self._is_certain = True
        self._read(function.body)

    def post_norms(self) -> list[str]:
        """Names of the norms, relative to the module."""
        found = [name for name, value in self._norms if value.uses == 1 and value.is_residual_without_norm()]
        return list(dict.fromkeys(found))

    def _read(self, statements: list[ast.stmt]) -> bool:
        """Follow statements; return whether they end the function."""
        for each in statements:
            if isinstance(each, ast.Return | ast.Raise):
                if isinstance(each, ast.Return) and each.value is not None:
                    self._use(each.value)
                return True
            if isinstance(each, ast.If):
                if self._if(each):
                    return True
            elif isinstance(each, ast.For | ast.While | ast.Try):
                self._merge([each.body, []])
            elif isinstance(each, ast.With):
                if self._read(each.body):
                    return True
            else:
                self._simple(each)
        return False

    def _simple(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            value = self._value(statement.value)
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                self._assign(target, value)
        elif isinstance(statement, ast.AugAssign):
            self._assign(statement.target, self._value(ast.BinOp(statement.target, statement.op, statement.value)))
        elif isinstance(statement, ast.Expr):
            self._use(statement.value)

    def _if(self, statement: ast.If) -> bool:
        decided = self._decided(statement.test)
        if decided is not _UNKNOWN:
            return self._read(statement.body if decided else statement.orelse)
        self._value(statement.test)
        certain, self._is_certain = self._is_certain, False
        ended = self._merge([statement.body, statement.orelse])
        self._is_certain = certain and not ended
        return False

    def _merge(self, bodies: list[list[ast.stmt]]) -> bool:
        """Follow alternatives, and join the values of each name; return whether one of them ends the function."""
        before, results, ended = self._names, [], []
        for body in bodies:
            self._names = dict(before)
            ended.append(self._read(body))
            results.append(self._names)
        first, second = results
        self._names = {name: self._joined(first.get(name), second.get(name)) for name in {**first, **second}}
        return any(ended)

    def _joined(self, first: _Value | None, second: _Value | None) -> _Value:
        known = [each for each in dict.fromkeys((first, second)) if each is not None]
        if len(known) == 1:
            return known[0]
        for each in known:
            each.uses += 1
        return _Value(known)

    def _assign(self, target: ast.expr, value: _Value) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
            return
        value.uses += 1
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._assign(each, _Value([value]))

    def _use(self, expression: ast.expr) -> _Value:
        value = self._value(expression)
        value.uses += 1
        return value

    def _value(self, expression: ast.expr) -> _Value:
        if isinstance(expression, ast.Name):
            return self._names.setdefault(expression.id, _Value())
        if isinstance(expression, ast.Call):
            return self._call(expression)
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
            addends = [self._use(each) for each in _addends(expression)]
            return _Value(addends, addends)
        if isinstance(expression, ast.NamedExpr):
            value = self._value(expression.value)
            self._assign(expression.target, value)
            return value
        if isinstance(expression, ast.Attribute) and expression.attr in _METADATA:
            return _Value()
        certain = self._is_certain
        self._is_certain = certain and not isinstance(expression, ast.IfExp | ast.BoolOp | ast.Lambda)
        sources = [self._use(each) for each in ast.iter_child_nodes(expression) if isinstance(each, ast.expr)]
        self._is_certain = certain
        return _Value(sources)

    def _call(self, call: ast.Call) -> _Value:
        values = [self._use(each) for each in [*call.args, *(each.value for each in call.keywords)]]
        function, called = call.func, self._attribute(call.func)
        if isinstance(called, nn.Module):
            if self._is_certain and values and _is_token_norm(called):
                self._norms.append((ast.unparse(function).removeprefix(f"{self._self}."), values[0]))
            return _Value(values, has_norm=_contains_norm(called))
        name = ast.unparse(function).rpartition(".")[2]
        if _first_name(function) in _TORCH_NAMES:
            return _Value(values, has_norm="norm" in name)
        if isinstance(function, ast.Attribute) and called is _UNKNOWN:  # a method of a value, as in x.transpose(1, 2)
            return _Value([*values, self._use(function)], has_norm="norm" in name)
        return _Value(values, has_norm=self._could_norm(called))

    def _could_norm(self, called: object) -> bool:
        """Whether a method of the module uses a norm or other methods, or cannot be read."""
        source = _source_of(called) if inspect.isfunction(called) else None
        if source is None or "norm" in ast.unparse(source).lower():
            return True
        used = [self._attribute(each) for each in ast.walk(source) if isinstance(each, ast.Attribute)]
        return any(_contains_norm(each) if isinstance(each, nn.Module) else inspect.isroutine(each) for each in used)

    def _decided(self, test: ast.expr) -> object:
        """The outcome of `self.a`, `not self.a`, `self.a == 1` and `self.a is None`; `_UNKNOWN` for any other test."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand)
            return inner if inner is _UNKNOWN else not inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
            value, constant = self._attribute(test.left), test.comparators[0].value
            if isinstance(value, bool | int | str | None):
                is_equal = value == constant
                known = {ast.Eq: is_equal, ast.NotEq: not is_equal, ast.Is: is_equal, ast.IsNot: not is_equal}
                return known.get(type(test.ops[0]), _UNKNOWN)
        value = self._attribute(test)
        return value if isinstance(value, bool) else _UNKNOWN

    def _attribute(self, expression: ast.expr) -> object:
        """The present value of `self.a`, `self.a.b` or `self.a[i]`; `_UNKNOWN` for any other expression."""
        if isinstance(expression, ast.Subscript):
            several = self._attribute(expression.value)
            return several[0] if isinstance(several, nn.ModuleList) and len(several) else _UNKNOWN
        if not isinstance(expression, ast.Attribute):
            return _UNKNOWN
        if isinstance(expression.value, ast.Name) and expression.value.id == self._self:
            plain = inspect.getattr_static(self._module, expression.attr, _UNKNOWN)
            return self._module._modules.get(expression.attr, plain)
        owner = self._attribute(expression.value)
        return owner._modules.get(expression.attr, _UNKNOWN) if isinstance(owner, nn.Module) else _UNKNOWN


def _addends(expression: ast.expr) -> Iterator[ast.expr]:
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
        yield from _addends(expression.left)
        yield from _addends(expression.right)
    else:
        yield expression


def _first_name(function: ast.expr) -> str:
    """`torch` of `torch.nn.functional.gelu`; "" for a method of the result of a call."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""
