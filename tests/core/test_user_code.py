"""The text of the lines that facts name: as at the first use of the file, and nothing if it cannot be read."""

from __future__ import annotations

import pytest

from surefoot.core.user_code import place, source_lines, without_secrets


def test_the_text_of_a_named_line_is_that_of_the_file_at_its_first_use(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\n    loss.backward()  \nprint('é')\n", encoding="utf-8")
    names = place(str(script), 2), place(str(script), 3)
    script.write_text("something else\n")
    assert [source_lines()[name] for name in names] == ["    loss.backward()", "print('é')"]


def test_lines_that_cannot_be_read_have_no_text(tmp_path):
    script = tmp_path / "short.py"
    script.write_text("x = 1\n")
    unreadable = [place(str(script), 9), place(str(tmp_path / "missing.py"), 1), place("<string>", 1)]
    assert not set(unreadable) & set(source_lines())


def test_the_lines_around_a_named_one_are_kept_with_their_indentation(tmp_path):
    script = tmp_path / "around.py"
    lines = [f"line_{number} = {number}" for number in range(1, 21)]
    lines[9:12] = ["for x in data:", "\tloss = model(x)", "    password = 'correct-horse-7'"]
    script.write_text("\n".join(lines), encoding="utf-8")
    file = place(str(script), 11).rpartition(":")[0]
    found = source_lines()
    assert [found.get(f"{file}:{number}") for number in range(7, 16)] == [
        None, "line_8 = 8", "line_9 = 9", "for x in data:", "    loss = model(x)", "    password = <redacted>",
        "line_13 = 13", "line_14 = 14", None,
    ]  # fmt: skip


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
