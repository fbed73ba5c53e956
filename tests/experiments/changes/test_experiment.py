"""An experiment ends when it has shown enough, and the user's files stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from pathlib import Path

    from watched import Nursery

LOSS = "loss_of = F.cross_entropy"


def test_it_ends_at_the_ordered_step_without_the_scripts_last_words(watch: Nursery) -> None:
    start = """
    import os
    print("SUREFOOT_EXPERIMENT" in os.environ)
    try:
        for step in range(60):
            optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
    finally:
        print("finally")
    print("a long evaluation")
    """
    run = watch.under({"steps": 12}, CLASSES, NET, start)
    assert run.output.split() == ["False", "finally"]
    assert (run.facts["steps"], run.facts["experiment"]["ended"]) == (12, "steps")
    assert run.loaded[1].exit_code == 0
    assert "crash" not in run.facts


def test_losses_that_stay_non_finite_end_it(watch: Nursery) -> None:
    run = watch.under({}, CLASSES, NET, "loss_of = lambda out, y: F.cross_entropy(out, y) * float('nan')", LOOP)
    assert run.facts["experiment"]["ended"] == "non-finite"
    assert run.facts["steps"] < 40


def test_a_script_that_catches_everything_is_ended_again_at_the_next_step(watch: Nursery) -> None:
    loop = """
    for step in range(60):
        try:
            optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
        except BaseException:
            print("caught")
    """
    run = watch.under({"steps": 12}, CLASSES, NET, loop)
    assert run.facts["steps"] == 12


def test_a_link_becomes_a_file_of_its_own_before_it_is_written_to(watch: Nursery, tmp_path: Path) -> None:
    real = {name: tmp_path / name for name in ("w", "a", "torch")}
    for path in real.values():
        path.write_text("precious\n")
    made = f"""
    import os
    for name in ("w", "a", "torch"):
        os.symlink({str(tmp_path)!r} + "/" + name, name)
    open("w", "w").write("new")
    open("a", "a").write("more")
    torch.save(model.state_dict(), "torch")
    print(open("w").read(), *open("a").read().split(), len(torch.load("torch")))
    os.rename("w", "moved"); os.remove("a")
    """
    run = watch.under({"began": 2e9}, CLASSES, NET, LOSS, LOOP, made)
    assert run.output.split() == ["new", "precious", "more", "4"], run.errors[-1500:]
    assert all(path.read_text() == "precious\n" for path in real.values())


@pytest.mark.parametrize(
    "act",
    [
        "open({0!r}, 'w')",
        "open({0!r}, 'ab')",
        "torch.save({{}}, {0!r})",
        "os.remove({0!r})",
        "os.replace('train.py', {0!r})",
    ],
)
def test_a_file_that_was_there_before_is_not_touched(watch: Nursery, tmp_path: Path, act: str) -> None:
    real = tmp_path / "results.csv"
    real.write_text("precious")
    run = watch.under({"began": 2e9}, CLASSES, NET, LOSS, LOOP, "import os", act.format(str(real)))
    assert real.read_text() == "precious"
    assert run.facts["experiment"]["refused"] == str(real)
    assert run.facts["crash"]["type"] == "PermissionError"


def test_new_files_elsewhere_are_allowed_and_listed(watch: Nursery, tmp_path: Path) -> None:
    path = tmp_path / "new.txt"
    run = watch.under({}, CLASSES, NET, LOSS, LOOP, f"open({str(path)!r}, 'w').write('x')")
    assert path.read_text() == "x"
    assert str(path) in run.facts["experiment"]["outside"]
