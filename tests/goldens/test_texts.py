"""What users and the report page are given is byte for byte what it was; see README.md in this folder."""

import pytest

from goldens.golden import FOLDER, compare
from goldens.texts import TEXTS


@pytest.mark.parametrize("name", TEXTS)
def test_it_is_byte_for_byte_as_it_was(name, tmp_path):
    compare(name, TEXTS[name](tmp_path))


def test_no_golden_text_is_left_over():
    found = [path.relative_to(FOLDER).as_posix() for kind in ("txt", "json") for path in FOLDER.rglob(f"*.{kind}")]
    assert sorted(found) == sorted(TEXTS)
