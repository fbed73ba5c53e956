"""Lines of a script that a report shows contain no secrets."""

from __future__ import annotations

import pytest

from surefoot.core.source_text import without_secrets


def shown(text: str) -> list[str]:
    return without_secrets(text.splitlines())


@pytest.mark.parametrize(
    "code",
    [
        'api_key = (\n    "correct-horse-7"\n)\n',
        'login(\n    user="me",\n    password="correct-horse-7",\n)\n',
        'os.environ["WANDB_API_KEY"] = (  # of the team\n    "correct-horse-7"\n)\n',
        'os.environ.setdefault(\n    "HF_TOKEN",\n    "correct-horse-7",\n)\n',
        'settings = {\n    "db_password":\n        "correct-horse-7",\n}\n',
        'secret = (\n    "first part"\n    "correct-horse-7"\n)\n',
        'KEY = """-----BEGIN RSA PRIVATE KEY-----\ncorrect-horse-7\n-----END RSA PRIVATE KEY-----"""\n',
        'url = "https://me:correct-horse-7@example.org/data"\n',
    ],
)
def test_a_secret_on_any_line_of_its_statement_is_removed(code):
    lines = shown(code + "loss.backward()\n")
    assert "correct-horse-7" not in "\n".join(lines)
    assert "<redacted>" in "\n".join(lines)
    assert lines[-1] == "loss.backward()"
    assert len(lines) == code.count("\n") + 1


def test_ordinary_code_is_unchanged():
    code = (
        "tokenizer.pad_token = tokenizer.eos_token\n"
        "batch = {'key': value, 'pad_token': '<pad>', \"text\": '''two\nlines'''}\n"
        "    loss = model(x, mask='causal')  # the loss\n"
    )
    assert shown(code) == code.splitlines()


def test_only_the_secret_of_a_line_is_removed():
    assert shown("a(token='correct-horse-7', password='correct-horse-8', size=3)") == [
        "a(token=<redacted>, password=<redacted>, size=3)"
    ]


def test_a_file_that_is_not_python_shows_no_line():
    assert shown('x = """never closed\npassword\n') == []
