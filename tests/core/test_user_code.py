"""The text of the lines that facts name: as at the first use of the file, and nothing if it cannot be read."""

from __future__ import annotations

from surefoot.core.user_code import place, source_lines


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
