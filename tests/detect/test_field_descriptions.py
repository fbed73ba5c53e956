"""Every setting of every detector, clipper and scaler has a description under its field, where editors find it."""

import ast
import dataclasses
import inspect
import textwrap

import surefoot as sf


def undescribed(kind):
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        ):
            yield f"{kind.__name__}.{field.target.id}"


def test_every_field_is_described():
    exported = [getattr(sf, name) for name in sf.__all__]
    kinds = [each for each in exported if isinstance(each, type) and dataclasses.is_dataclass(each)]
    rules = [each for each in kinds if hasattr(each, "init") and hasattr(each, "update")]
    assert len(rules) > 12
    assert [name for kind in rules for name in undescribed(kind)] == []
