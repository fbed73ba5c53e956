"""Which files are the user's, and what they call their objects."""

import functools
import json
import os
import sys
import sysconfig
import weakref

import pytest
import torch

import surefoot
from surefoot.core import user_code
from surefoot.core.user_code import is_users, place, variables
from surefoot.watch.user_frames import caller, is_library, name_of, site, user_frame

PACKAGE = os.path.dirname(surefoot.__file__)
LIBRARIES = sysconfig.get_path("purelib")


@pytest.mark.parametrize(
    ("filename", "users", "library"),
    [
        ("/home/me/project/train.py", True, False),
        ("/home/me/torch/train.py", True, False),
        ("<stdin>", True, False),
        ("<ipython-input-3-abc>", True, False),
        ("<string>", False, False),
        ("<frozen runpy>", False, False),
        (torch.__file__, False, False),
        (os.path.join(LIBRARIES, "numpy", "linalg.py"), False, False),
        (json.__file__, False, False),
        (os.path.join(LIBRARIES, "transformers", "trainer.py"), False, True),
        ("/opt/env/lib/python3.12/site-packages/lightning/loop.py", False, True),
        ("/opt/env/lib/python3.12/site-packages/torch/optim/sgd.py", False, False),
        (os.path.join(PACKAGE, "guard", "attach.py"), False, True),
        (os.path.join(PACKAGE, "zoo", "tuning", "healthy", "a.py"), True, False),
        (os.path.join(PACKAGE, "zoo", "score.py"), False, True),
    ],
)
def test_a_file_is_the_users_or_a_librarys_or_neither(filename, users, library):
    assert (is_users(filename), is_library(filename)) == (users, library)


def test_the_innermost_frame_of_the_user_is_found_through_library_code():
    found = []

    class Asked:
        def __lt__(self, other):
            found.append(site())
            return False

    functools.reduce(max, [Asked(), Asked()])
    line = test_the_innermost_frame_of_the_user_is_found_through_library_code.__code__.co_firstlineno + 5
    assert found == [f"{os.path.relpath(__file__)}:{line}"]
    assert user_frame() is sys._getframe()


def test_outside_of_all_user_code_there_is_no_place(monkeypatch):
    class NoFile(dict[str, bool]):
        def __missing__(self, filename):
            return False

    monkeypatch.setattr(user_code, "_own_files", NoFile())
    assert user_frame() is None
    assert site() == ""


def test_the_caller_is_who_called_the_function_that_is_observed():
    def observed():
        return caller()

    frame = observed()
    assert frame is not None
    assert frame.f_code.co_name == "observed"  # a function of the user's is its own caller


def test_a_path_below_the_working_folder_is_shown_relative_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert place(str(tmp_path / "sub" / "train.py"), 14) == f"{os.path.join('sub', 'train.py')}:14"
    assert place("/elsewhere/train.py", 3) == "/elsewhere/train.py:3"


def test_reading_the_variables_of_a_function_keeps_nothing_alive():
    class Held:
        pass

    def inner():
        kept = Held()
        alive = weakref.ref(kept)
        assert variables(sys._getframe())["kept"] is kept
        del kept
        return alive() is None

    assert inner()


def test_the_variables_of_a_script_are_left_in_place():
    scope = {"held": 5}
    exec("import sys\nfrom surefoot.core.user_code import variables\nfound = variables(sys._getframe())", scope)
    assert (scope["held"], scope["found"]["held"]) == (5, 5)


SHARED = object()


def test_an_object_is_called_what_the_nearest_frame_calls_it():
    model = object()

    def step(net):
        return name_of(net, sys._getframe()), name_of(SHARED, sys._getframe()), name_of(object(), sys._getframe())

    assert step(model) == ("net", "SHARED", "")
    assert name_of(model, sys._getframe()) == "model"


def test_a_name_with_an_underscore_is_no_name():
    def step(_hidden):
        return name_of(_hidden, sys._getframe())

    found = step(object())
    assert found == ""
