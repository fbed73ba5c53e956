import math

import pytest

from surefoot.errors import UsageError
from surefoot.record.sinks.extras import load


def test_a_module_that_is_there_is_returned():
    assert load("math", "math") is math


def test_a_missing_package_names_the_extra_that_brings_it():
    with pytest.raises(UsageError, match=r"needs `no_such_package`.*pip install -e '\.\[nowhere\]'"):
        load("no_such_package.inner", "nowhere")
